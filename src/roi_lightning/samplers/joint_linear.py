"""A linear layer that learns its mask and trains its weight at once."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.samplers.masked_linear import SharedState, SparseLinear


class JointLinear(SparseLinear):
    """A layer with logits that draws masks of a weight in training, `trained`, float32 [out, in].

    Logits learn from the trained weight as they do from a frozen one. The trained weight's gradient is the drawn
    weight's times the drawn mask, as if that were given; a weight of zero stays zero. `weight` is the dense model's.
    """

    learned = ("logits", "trained")
    trained: nn.Parameter

    def __init__(self, dense: nn.Linear | Conv1D, name: str, state: SharedState) -> None:
        super().__init__(dense, name, state)
        self.trained = nn.Parameter(self.weight.detach().to(torch.float32, copy=True))

    @override
    def drawn_weight(self) -> Tensor:
        weight = self.own_weight().to(self.weight.dtype)
        drawn: Tensor = _WithWeightGradient.apply(self.trained, weight, self.drawn(weight))  # type: ignore[no-untyped-call]
        return drawn

    @override
    def own_weight(self) -> Tensor:
        return self.trained.detach()


class _WithWeightGradient(torch.autograd.Function):
    """The drawn weight, which passes its gradient on to the weight it was drawn of, too."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, weight: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(weight, drawn)
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        weight, drawn = ctx.saved_tensors
        mask = (drawn / weight).masked_fill_(weight == 0, 0)
        return mask.mul_(grads[0]).float(), None, grads[0]
