"""Dense layers that read their weights as fast as packed ones do where they have few rows to multiply."""

from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from typing_extensions import override

from roi_lightning.products import WideLinear, linear
from roi_lightning.runtime import decode

_FEW: Final = 8
_Model = TypeVar("_Model", bound=nn.Module)


class FewRowsLinear(WideLinear):
    """An `nn.Linear` whose products of up to eight rows on a processor, without gradient, are those of `decode`."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if is_compiling():
            return nn.functional.linear(input, weight, bias)
        if (
            input.is_cpu
            and weight.is_cpu
            and input.dtype == weight.dtype
            and 0 < input.numel() <= _FEW * weight.shape[1]
            and input.shape[-1] == weight.shape[1]
            and weight.is_contiguous()
            and not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
            and (y := decode.multiply_dense(input, weight, bias)) is not None
        ):
            return y
        return linear(input, weight, bias)


def speed_up_dense(lm: _Model) -> _Model:
    """Turn the linear layers of a model that are of no special kind into `FewRowsLinear`, in place."""
    for module in lm.modules():
        if type(module) in (nn.Linear, WideLinear):
            module.__class__ = FewRowsLinear
    return lm
