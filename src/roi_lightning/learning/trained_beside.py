"""A frozen parameter of any module with a trained float32 copy beside it, for norms and biases."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from roi_lightning.samplers.masked_linear import LayerState

_SUFFIX: Final = "_trained"


def train_beside(module: nn.Module, name: str, state: LayerState) -> str:
    """Let a module compute with a trained copy of a parameter, unless the model is to be dense.

    Args:
        module: Whose own the parameter is; its `forward` is wrapped.
        name: Of the parameter, which stays as it is.
        state: Says when the model is dense.

    Returns:
        The name of the copy, float32, registered beside it.
    """
    copy = name + _SUFFIX
    trained = module.get_parameter(name).detach().to(torch.float32, copy=True)
    module.register_parameter(copy, nn.Parameter(trained))
    module.forward = _with_copy(module, name, state, module.forward)
    return copy


def _with_copy(
    module: nn.Module, name: str, state: LayerState, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if state.mode != "sample":
            return forward(*args, **kwargs)
        frozen = module._parameters.pop(name)
        assert frozen is not None
        try:
            # A plain attribute, which is found where the parameter was.
            module.__dict__[name] = module.get_parameter(name + _SUFFIX).to(frozen.dtype)
            return forward(*args, **kwargs)
        finally:
            del module.__dict__[name]
            module._parameters[name] = frozen

    return run
