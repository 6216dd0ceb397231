"""The samplers of this package draw by a kernel: C++ on CPUs, Triton on GPUs, plain torch elsewhere.

A device's own kernel may decline (no compiler, an unknown dtype, too large a group); the plain form, which runs
everywhere, is its fallback. The backward pass draws the same noise again: nothing is kept but the arguments.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers.base import Draw, Inputs, Sampler
from roi_lightning.samplers.eager import Eager

# With fewer weights a tensor takes less time than starting compiled code is worth.
_MIN_COMPILED: Final = 1 << 16


class Kernel(Protocol):
    """Both passes of a sampler; each returns whether it could be done."""

    def fill(self, inputs: Inputs, out: Tensor) -> bool:
        """Write weight * mask into `out`, which is like the weight."""

    def logits_gradient(self, inputs: Inputs, gradient: Tensor, out: Tensor) -> bool:
        """Write the gradient of the logits into `out`, by that of the masked weight, which is like the weight."""


class KernelSampler(Sampler):
    """A sampler whose two passes are kernels.

    Attributes:
        eager: The passes in plain torch.
        kernels: The faster ones, by the type of device.
        compiled: Whether large tensors may go through them; the same masks up to rounding.
    """

    eager: ClassVar[Eager]
    kernels: ClassVar[Mapping[str, Kernel]]
    compiled: bool

    def inputs(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Inputs:
        """What the kernels get."""
        return Inputs(weight.contiguous(), logits.contiguous(), pattern, draw)

    @override
    def fill(self, out: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> None:
        inputs = self.inputs(weight, logits, pattern, draw)
        any(kernel.fill(inputs, out) for kernel in self._by_preference(weight))

    @override
    def logits_gradient(
        self, gradient: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw
    ) -> Tensor:
        inputs, own = self.inputs(weight, logits, pattern, draw), gradient.contiguous()
        out = torch.empty_like(inputs.logits)
        any(kernel.logits_gradient(inputs, own, out) for kernel in self._by_preference(weight))
        return out

    def _by_preference(self, weight: Tensor) -> list[Kernel]:
        fast = self.kernels.get(weight.device.type)
        if fast is None or not self.compiled or weight.numel() < _MIN_COMPILED:
            return [self.eager]
        return [fast, self.eager]

    @override
    def masked_weight(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
        drawn: Tensor = _MaskedWeight.apply(self, weight, logits, pattern, draw)  # type: ignore[no-untyped-call]
        return drawn


class _MaskedWeight(torch.autograd.Function):
    """A sampler's two passes as one function of the logits."""

    @staticmethod
    def forward(
        ctx: Any, sampler: Sampler, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw
    ) -> Tensor:
        ctx.sampler, ctx.pattern, ctx.draw = sampler, pattern, draw
        ctx.save_for_backward(weight, logits)
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        sampler.fill(out, weight, logits, pattern, draw)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, None, None]:
        weight, logits = ctx.saved_tensors
        own = ctx.sampler.logits_gradient(grads[0], weight, logits, ctx.pattern, ctx.draw)
        return None, None, own, None, None
