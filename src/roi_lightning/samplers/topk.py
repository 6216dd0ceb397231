"""RoI's sampler: one logit per weight, masks drawn without replacement by the relaxed Gumbel-Top-K.

`GumbelTopK` passes the relaxed mask on, `StraightThrough` passes the hard top-N of the same keys and lets
the gradient flow through the relaxation. The backward pass draws the same noise again and so keeps nothing
but the logits and the frozen weight, which are alive anyway.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.noise import gumbel, noise_key
from roi_lightning.pattern import NMPattern, top_members
from roi_lightning.samplers import fused
from roi_lightning.samplers.base import Draw, Sampler
from roi_lightning.samplers.chunks import Chunk, chunks, worth_compiling
from roi_lightning.samplers.compiling import run_compiled
from roi_lightning.samplers.kept_norm import KeptNorm
from roi_lightning.samplers.reference import PushDown
from roi_lightning.samplers.unrolled import relaxed_mask, relaxed_mask_gradient

# Code for larger groups takes minutes to compile: it grows with members times picks.
_MOST_UNROLLED: Final = 32


@dataclass(frozen=True)
class GumbelTopK(Sampler):
    """The paper's relaxation: soft masks in training.

    Args:
        push_down: `paper`, or `scaled` for a push-down divided by τ, which keeps a member from being picked
            twice when N >= 3 (see `relaxed_top_n`).
        compiled: Whether large layers may go through `torch.compile`; the same masks up to rounding.
    """

    method = "roi"

    push_down: PushDown = "paper"
    compiled: bool = True

    @property
    def hard_forward(self) -> bool:
        """Whether the forward pass sees a hard mask."""
        return False

    @override
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern, dim: int) -> tuple[int, ...]:
        return weight

    @override
    def initial_logits(
        self, noise: Tensor, mask: Tensor | None, strength: float, pattern: NMPattern, dim: int
    ) -> Tensor:
        return noise if mask is None else noise + torch.where(mask, strength, -strength)

    @override
    def masked_weight(
        self,
        weight: Tensor,
        logits: Tensor,
        pattern: NMPattern,
        dim: int,
        draw: Draw,
        layer: str,
        kept_norm: KeptNorm | None = None,
    ) -> Tensor:
        job = _Job(self, pattern, dim, draw, layer, kept_norm)
        result = _MaskedWeight.apply(weight.contiguous(), logits, job)  # type: ignore[no-untyped-call]
        assert isinstance(result, Tensor)
        return result

    @override
    def hard_mask(self, logits: Tensor, pattern: NMPattern, dim: int) -> Tensor:
        return pattern.top(logits.detach(), dim)

    @override
    def choices(self, logits: Tensor, pattern: NMPattern, dim: int) -> Tensor:
        return pattern.group(logits, dim)

    @override
    def picks(self, pattern: NMPattern) -> int:
        return pattern.n


@dataclass(frozen=True)
class StraightThrough(GumbelTopK):
    """Hard masks forward, the relaxation's gradient backward (the paper's Appendix on straight-through).

    Args:
        push_down: As in `GumbelTopK`; concerns the gradient only.
        compiled: As in `GumbelTopK`.
    """

    @property
    @override
    def hard_forward(self) -> bool:
        return True


@dataclass(frozen=True)
class _Job:
    """One layer's draw."""

    sampler: GumbelTopK
    pattern: NMPattern
    dim: int
    draw: Draw
    layer: str
    kept_norm: KeptNorm | None

    @property
    def push(self) -> float:
        return 1.0 if self.sampler.push_down == "paper" else 1.0 / self.draw.tau

    @property
    def pull(self) -> Tensor | float:
        return 0.0 if self.kept_norm is None else self.kept_norm.pull()

    def worth_compiling(self, weight: Tensor) -> bool:
        unrolled = self.pattern.m * self.pattern.n
        return self.sampler.compiled and unrolled <= _MOST_UNROLLED and worth_compiling(weight)

    def numbers(self, chunk: Chunk, device: torch.device) -> tuple[Tensor, Tensor]:
        """The kernels' `ints` and `floats`."""
        key = noise_key(self.draw.seed, self.draw.index, self.layer)
        ints = torch.tensor([chunk.first, *key], dtype=torch.int32, device=device)
        known = [1 / self.draw.lam, 1 / self.draw.tau, self.push]
        floats = torch.tensor([*known, 0.0], dtype=torch.float32, device=device)
        floats[3] = self.pull
        return ints, floats

    def keys(self, logits: Tensor, chunk: Chunk) -> Tensor:
        """φ/λ + g of a chunk as [M, groups...]."""
        part = chunk.of(logits)
        index = torch.arange(chunk.first, chunk.first + part.numel(), dtype=torch.int32, device=logits.device)
        noise = gumbel(index, noise_key(self.draw.seed, self.draw.index, self.layer))
        return part.float().div(self.draw.lam).add_(noise.view_as(part)).movedim(1, 0).contiguous()

    def mask(self, keys: Tensor) -> Tensor:
        """The mask of keys (overwritten), fp32 or boolean [M, groups...]."""
        if self.sampler.hard_forward:
            return top_members(keys, self.pattern.n)
        return relaxed_mask(keys, self.pattern.n, self.draw.tau, self.push)


class _MaskedWeight(torch.autograd.Function):
    """weight * mask(logits, draw), and the logits' gradient by drawing again."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, logits: Tensor, job: _Job) -> Tensor:
        ctx.save_for_backward(weight, logits)
        ctx.job = job
        out = torch.empty_like(weight)
        if not (job.worth_compiling(weight) and _compiled_forward(out, weight, logits, job)):
            _eager_forward(out, weight, logits, job)
        if job.kept_norm is not None:
            job.kept_norm.add(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        weight, logits = ctx.saved_tensors
        job: _Job = ctx.job
        out = torch.empty_like(logits)
        if not (job.worth_compiling(weight) and _compiled_backward(out, weight, logits, grads[0], job)):
            _eager_backward(out, weight, logits, grads[0], job)
        return None, out, None


def _compiled_forward(out: Tensor, weight: Tensor, logits: Tensor, job: _Job) -> bool:
    for chunk in chunks(weight, job.pattern, job.dim, compiled=True):
        tensors = chunk.of(logits.detach()), chunk.of(weight.detach()), chunk.of(out)
        numbers, pattern = job.numbers(chunk, weight.device), job.pattern
        if not run_compiled(
            fused.masked_weight, *tensors, *numbers, pattern.m, pattern.n, job.sampler.hard_forward
        ):
            return False
    return True


def _compiled_backward(out: Tensor, weight: Tensor, logits: Tensor, grad: Tensor, job: _Job) -> bool:
    grad = grad.contiguous()
    for chunk in chunks(weight, job.pattern, job.dim, compiled=True):
        tensors = (chunk.of(x.detach()) for x in (logits, weight, grad, out))
        numbers, pattern = job.numbers(chunk, weight.device), job.pattern
        fixed = pattern.m, pattern.n, job.sampler.hard_forward, job.kept_norm is not None
        if not run_compiled(fused.logits_gradient, *tensors, *numbers, *fixed):
            return False
    return True


def _eager_forward(out: Tensor, weight: Tensor, logits: Tensor, job: _Job) -> None:
    for chunk in chunks(weight, job.pattern, job.dim):
        mask = job.mask(job.keys(logits, chunk))
        # The product is taken in fp32 and rounded once to the weight's dtype.
        chunk.members(out).copy_(mask * chunk.members(weight).float())


def _eager_backward(out: Tensor, weight: Tensor, logits: Tensor, grad: Tensor, job: _Job) -> None:
    for chunk in chunks(weight, job.pattern, job.dim):
        members = chunk.members(weight).float()
        of_mask = (chunk.members(grad.contiguous()).float() * members).contiguous()
        keys = job.keys(logits, chunk)
        if job.kept_norm is not None:
            of_mask -= job.pull * job.mask(keys.clone()) * members.square()
        of_keys = relaxed_mask_gradient(keys, of_mask, job.pattern.n, job.draw.tau, job.push)
        chunk.members(out).copy_(of_keys.div_(job.draw.lam))
