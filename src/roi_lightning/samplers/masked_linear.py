"""Linear layers with a frozen weight and something learnable, put in the place of the dense ones.

What a forward pass does is explicit state, shared by all layers of a model: `dense` uses the weight as it
is, `sample` what is being learned, `fixed` a weight masked beforehand. It never follows `module.training`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.models.layers import LinearLayer
from roi_lightning.samplers.base import Draw, KeptNorm, Sampler
from roi_lightning.utils.dtensor import distribute_like, full_tensor

Mode = Literal["dense", "sample", "fixed"]


@dataclass
class LayerState:
    """What all layers of one model have in common, whatever is learned on them.

    Attributes:
        pattern: Of all layers, or of each; a layer asks for its own (`MaskedLinear.pattern`).
        mode: What a forward pass does.
    """

    pattern: Pattern
    mode: Mode = "dense"


@dataclass(kw_only=True)
class SharedState(LayerState):
    """What all layers with logits have in common.

    Attributes:
        sampler: Turns logits into masks.
        draw: Which mask to draw in `sample` mode. Each layer draws in its own forward, so recomputation
            under activation checkpointing draws the same mask again.
        kept_norm: A term of the loss that grows out of the drawn weights, or None.
    """

    sampler: Sampler
    draw: Draw | None = None
    kept_norm: KeptNorm | None = None


class MaskedLinear(nn.Module, ABC):
    """Stands in for an `nn.Linear` or GPT-2's `Conv1D`, with the same parameter names and learned ones beside.

    Args:
        dense: The layer replaced; its parameters are shared, but for a `Conv1D`'s weight, of which this has a
            transposed copy.
        name: Its dotted name in the model.
        state: Shared by all layers.

    Attributes:
        learned: The names of the learned parameters.
        weight: [out, in].
        pattern: The layer's own.
        transposed: Whether the model's own weight is [in, out].
    """

    learned: ClassVar[tuple[str, ...]]
    state: LayerState

    def __init__(self, dense: LinearLayer, name: str, state: LayerState) -> None:
        super().__init__()
        self.weight, self.bias = dense.weight, dense.bias
        self.name, self.state, self.pattern = name, state, state.pattern.of(name)
        self.transposed = isinstance(dense, Conv1D)
        if self.transposed:
            self.weight = nn.Parameter(dense.weight.detach().t().contiguous(), requires_grad=False)
        self._fixed: Tensor | None = None

    @abstractmethod
    def drawn_weight(self) -> Tensor:
        """The weight of `sample` mode, differentiable in what is learned."""

    @abstractmethod
    def hard_mask(self) -> Tensor:
        """The mask learned so far, boolean [out, in]; gathered where the layer is sharded."""

    def choices(self) -> Tensor | None:
        """What each group chooses from, [..., choices], the highest first; None where nothing of the kind is learned.

        `MaskMonitor` takes statistics of it. A group takes as many as `picks` says.
        """
        return None

    @property
    def picks(self) -> int:
        """How many of its choices a group takes."""
        return self.pattern.n

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective_weight(), self.bias)

    def effective_weight(self) -> Tensor:
        """The weight that a forward pass uses now, of the shape and dtype of `weight`."""
        if self.state.mode == "dense":
            return self.weight
        if self.state.mode == "fixed":
            assert self._fixed is not None, f"{self.name} has no fixed mask"
            return full_tensor(self._fixed)
        return self.drawn_weight()

    def packed(self, mask: Tensor) -> LayerMask:
        """A boolean mask [out, in] as it is stored."""
        return LayerMask.from_rows(mask, self.transposed)

    def as_stored(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight [out, in] as it is written, on the CPU; gathered where it is sharded."""
        rows = full_tensor(weight).cpu()
        return (rows.t() if self.transposed else rows).to(dtype).contiguous()

    def own_weight(self) -> Tensor:
        """The weight that the hard mask is for, [out, in], any float dtype; sharded as `weight` is."""
        return self.weight.detach()

    def hard_weight(self) -> Tensor:
        """`own_weight` under the hard mask."""
        return _masked(self.own_weight(), self.hard_mask())

    def fix(self, mask: Tensor | None = None) -> None:
        """Set the weight of `fixed` mode: the frozen one under a mask, or `hard_weight` without one."""
        fixed = self.hard_weight() if mask is None else _masked(self.weight.detach(), mask)
        self._fixed = fixed.to(self.weight.dtype)

    def unfix(self) -> None:
        """Free the memory of `fixed` mode's weight."""
        self._fixed = None


def _masked(weight: Tensor, mask: Tensor) -> Tensor:
    return weight.masked_fill(~distribute_like(mask, weight), 0)


class SparseLinear(MaskedLinear):
    """A layer with `logits`, from which every forward pass in `sample` mode draws a mask.

    Attributes:
        prior: The mask from which the logits start; None without one.
        prior_margin: How far the hard mask leans to it: added to the logits as a start's strength is.
    """

    learned: ClassVar[tuple[str, ...]] = ("logits",)
    logits: nn.Parameter
    state: SharedState
    prior: LayerMask | None = None
    prior_margin: float = 0.0

    def __init__(self, dense: LinearLayer, name: str, state: SharedState) -> None:
        super().__init__(dense, name, state)
        shape = state.sampler.logits_shape(tuple(self.weight.shape), self.pattern)
        self.logits = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self.weight.device))

    @override
    def drawn_weight(self) -> Tensor:
        return self.drawn(self.weight)

    def drawn(self, weight: Tensor) -> Tensor:
        """A weight [out, in], frozen, under the mask that is drawn now."""
        state = self.state
        assert state.draw is not None, "sample mode needs a draw"
        drawn = state.sampler.masked_weight(
            weight, self.logits, self.pattern, state.draw, self.name, state.kept_norm
        )
        if drawn.shape != self.weight.shape:
            raise UserError(
                f"{type(state.sampler).__name__}.masked_weight made {list(drawn.shape)} of the weight of "
                f"{self.name}, {list(self.weight.shape)}; return a tensor of the weight's shape"
            )
        return drawn

    @override
    def hard_mask(self) -> Tensor:
        logits = full_tensor(self.logits.detach())
        if self.prior is not None and self.prior_margin:
            prior = self.prior.to_rows().to(logits.device)
            logits = self.state.sampler.initial_logits(logits, prior, self.prior_margin, self.pattern)
        return self.state.sampler.hard_mask(logits, self.pattern)

    @override
    def choices(self) -> Tensor:
        return self.state.sampler.choices(full_tensor(self.logits.detach()), self.pattern)

    @property
    @override
    def picks(self) -> int:
        return self.state.sampler.picks(self.pattern)


_Layer = TypeVar("_Layer", bound=MaskedLinear)
_State = TypeVar("_State", bound=LayerState)


def attach(
    lm: nn.Module,
    layers: Mapping[str, LinearLayer],
    state: _State,
    kind: Callable[[LinearLayer, str, _State], _Layer],
) -> dict[str, _Layer]:
    """Replace layers of a model by learning ones, in place.

    Args:
        lm: The model.
        layers: Dense layers by dotted name.
        state: Shared by the new layers.
        kind: The class of the new layers.

    Returns:
        The new layers by the same names.
    """
    learning = {name: kind(layer, name, state) for name, layer in layers.items()}
    for name, layer in learning.items():
        lm.set_submodule(name, layer)
    return learning


@contextmanager
def in_mode(state: LayerState, mode: Mode) -> Iterator[None]:
    """Run the model in another mode, then return to the one before."""
    before, state.mode = state.mode, mode
    try:
        yield
    finally:
        state.mode = before


@contextmanager
def fixed_masks(
    layers: Mapping[str, MaskedLinear], masks: Mapping[str, LayerMask] | None = None
) -> Iterator[None]:
    """Run the model under given masks, then return to the mode before.

    Args:
        layers: All learning layers of a model.
        masks: By layer name, for the frozen weights; what the layers have learned, hardened, if None.
    """
    if not layers:
        yield
        return
    try:
        for name, layer in layers.items():
            layer.fix(None if masks is None else masks[name].to_rows())
        with in_mode(next(iter(layers.values())).state, "fixed"):
            yield
    finally:
        for layer in layers.values():
            layer.unfix()


class JointLinear(SparseLinear):
    """A layer with logits that draws masks of a weight in training, `trained`, float32 [out, in].

    Logits learn from the trained weight as they do from a frozen one. The trained weight's gradient is the drawn
    weight's times the drawn mask, as if that were given; a weight of zero stays zero. `weight` is the dense model's.
    """

    learned = ("logits", "trained")
    trained: nn.Parameter

    def __init__(self, dense: LinearLayer, name: str, state: SharedState) -> None:
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
