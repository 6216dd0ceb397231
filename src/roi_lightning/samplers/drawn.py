"""weight * mask(logits, draw) as one autograd function that keeps nothing but its arguments.

The backward pass draws the same noise again. What computes the two passes is a way: there are several, of which the
fastest that works here is taken.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from roi_lightning.noise import noise_key
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers.base import Draw
from roi_lightning.samplers.kept_norm import KeptNorm


class Way(Protocol):
    """Something that can compute both passes, or say that it can't."""

    def masked_weight(self, weight: Tensor, logits: Tensor, out: Tensor) -> bool:
        """Write weight * mask into `out`; whether that could be done.

        Args:
            weight: Contiguous.
            logits: fp32, contiguous.
            out: Like the weight.
        """

    def logits_gradient(self, weight: Tensor, logits: Tensor, grad: Tensor, out: Tensor) -> bool:
        """Write the gradient of the logits into `out`; whether that could be done.

        Args:
            weight: Contiguous.
            logits: fp32, contiguous.
            grad: Of the masked weight, contiguous, of its type.
            out: Like the logits.
        """


@dataclass(frozen=True)
class Job(ABC):
    """One layer's draw.

    Attributes:
        pattern: The N:M pattern.
        dim: The weight's input dimension.
        draw: Which mask.
        layer: The layer's name, part of the noise's key.
        kept_norm: Whose gradient is added to the mask's, if any.
    """

    pattern: NMPattern
    dim: int
    draw: Draw
    layer: str
    kept_norm: KeptNorm | None

    @property
    def key(self) -> tuple[int, int]:
        """Of the noise."""
        return noise_key(self.draw.seed, self.draw.index, self.layer)

    @property
    def pull(self) -> Tensor | float:
        """Factor of the gradient of `kept_norm`, 0 without it."""
        return 0.0 if self.kept_norm is None else self.kept_norm.pull()

    @abstractmethod
    def ways(self, weight: Tensor) -> Iterator[Way]:
        """Those worth trying for this weight, the fastest first; the last one always works."""


def masked_weight(weight: Tensor, logits: Tensor, job: Job) -> Tensor:
    """The weight under the drawn mask, differentiable in the logits; shape and dtype of `weight`."""
    result = _MaskedWeight.apply(weight.contiguous(), logits.contiguous(), job)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


class _MaskedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, logits: Tensor, job: Job) -> Tensor:
        ctx.save_for_backward(weight, logits)
        ctx.job = job
        weight, logits, out = weight.detach(), logits.detach(), torch.empty_like(weight)
        next(way for way in job.ways(weight) if way.masked_weight(weight, logits, out))
        if job.kept_norm is not None:
            job.kept_norm.add(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        weight, logits = (tensor.detach() for tensor in ctx.saved_tensors)
        job: Job = ctx.job
        out, grad = torch.empty_like(logits), grads[0].contiguous()
        next(way for way in job.ways(weight) if way.logits_gradient(weight, logits, grad, out))
        return None, out, None
