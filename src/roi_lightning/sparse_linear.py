"""A linear layer with a frozen weight and learnable logits, put in the place of the dense one and back.

What a forward pass does is explicit state, shared by all layers of a model: `dense` uses the weight as it
is, `sample` draws a mask, `fixed` uses a weight masked beforehand. It never follows `module.training`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.pattern import NMPattern
from roi_lightning.prunable import input_dim
from roi_lightning.samplers.base import Draw, Sampler

Mode = Literal["dense", "sample", "fixed"]


@dataclass
class SharedState:
    """What all sparse layers of one model have in common.

    Attributes:
        sampler: Turns logits into masks.
        pattern: The N:M pattern.
        mode: What a forward pass does.
        draw: Which mask to draw in `sample` mode. Each layer draws in its own forward, so recomputation
            under activation checkpointing draws the same mask again.
    """

    sampler: Sampler
    pattern: NMPattern
    mode: Mode = "dense"
    draw: Draw | None = None


class SparseLinear(nn.Module):
    """Stands in for an `nn.Linear` or GPT-2's `Conv1D`, with the same parameter names and `logits` beside.

    Args:
        dense: The layer replaced; its parameters are shared, not copied.
        name: Its dotted name in the model.
        state: Shared by all layers.
    """

    logits: nn.Parameter

    def __init__(self, dense: nn.Linear | Conv1D, name: str, state: SharedState) -> None:
        super().__init__()
        self.weight, self.bias = dense.weight, dense.bias
        self.name, self.state = name, state
        self.dim = input_dim(dense)
        shape = state.sampler.logits_shape(tuple(self.weight.shape), state.pattern)
        self.logits = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self.weight.device))
        self._fixed: Tensor | None = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight = self.effective_weight()
        return F.linear(x, weight if self.dim == 1 else weight.t(), self.bias)

    def effective_weight(self) -> Tensor:
        """The weight that a forward pass uses now, of the shape and dtype of `weight`."""
        state = self.state
        if state.mode == "dense":
            return self.weight
        if state.mode == "fixed":
            assert self._fixed is not None, f"{self.name} has no fixed mask"
            return self._fixed
        assert state.draw is not None, "sample mode needs a draw"
        return state.sampler.masked_weight(
            self.weight, self.logits, state.pattern, self.dim, state.draw, self.name
        )

    def hard_mask(self) -> Tensor:
        """The mask without noise, boolean, of the weight's shape."""
        return self.state.sampler.hard_mask(self.logits, self.state.pattern, self.dim)

    def fix(self, mask: Tensor | None) -> None:
        """Set the weight of `fixed` mode: masked by `mask`, or free its memory with None."""
        self._fixed = None if mask is None else self.weight.detach().masked_fill(~mask, 0)


def attach(
    lm: nn.Module, layers: Mapping[str, nn.Linear | Conv1D], state: SharedState
) -> dict[str, SparseLinear]:
    """Replace layers of a model by sparse ones, in place.

    Args:
        lm: The model.
        layers: Dense layers by dotted name.
        state: Shared by the new layers.

    Returns:
        The sparse layers by the same names.
    """
    sparse = {name: SparseLinear(layer, name, state) for name, layer in layers.items()}
    for name, layer in sparse.items():
        lm.set_submodule(name, layer)
    return sparse


@contextmanager
def fixed_masks(
    layers: Mapping[str, SparseLinear], masks: Mapping[str, Tensor] | None = None
) -> Iterator[None]:
    """Run the model under given masks, then return to the mode before.

    Args:
        layers: All sparse layers of a model.
        masks: Boolean masks by layer name; the layers' own hard masks if None.
    """
    if not layers:
        yield
        return
    state = next(iter(layers.values())).state
    before = state.mode
    try:
        for name, layer in layers.items():
            layer.fix(layer.hard_mask() if masks is None else masks[name].to(layer.weight.device))
        state.mode = "fixed"
        yield
    finally:
        state.mode = before
        for layer in layers.values():
            layer.fix(None)
