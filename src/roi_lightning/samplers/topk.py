"""RoI's sampler: one logit per weight, masks drawn without replacement by the relaxed Gumbel-Top-K.

`GumbelTopK` passes the relaxed mask on, `StraightThrough` passes the hard top-N of the same keys and lets
the gradient flow through the relaxation. The backward pass draws the same noise again and so keeps nothing
but the logits and the frozen weight, which are alive anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.noise import gumbel
from roi_lightning.pattern import NMPattern, top_members
from roi_lightning.samplers import drawn, fused
from roi_lightning.samplers.base import Draw, Sampler
from roi_lightning.samplers.chunks import Chunk, chunks, worth_compiling
from roi_lightning.samplers.compiling import numbers_on, run_compiled
from roi_lightning.samplers.drawn import Job, Way
from roi_lightning.samplers.kept_norm import KeptNorm
from roi_lightning.samplers.native_draws import NativeWay, TopKDraw, columns_of
from roi_lightning.samplers.reference import PushDown
from roi_lightning.samplers.triton_draws import TritonWay
from roi_lightning.samplers.unrolled import relaxed_mask, relaxed_mask_gradient

# Code grows with members times picks: for larger groups torch.compile takes minutes, a C++ compiler half of one.
_MOST_UNROLLED: Final = 32
_MOST_NATIVE: Final = 256


@dataclass(frozen=True)
class GumbelTopK(Sampler):
    """The paper's relaxation: soft masks in training.

    Args:
        push_down: `paper`, or `scaled` for a push-down divided by τ, which keeps a member from being picked
            twice when N >= 3 (see `relaxed_top_n`) and is recommended there.
        compiled: Whether large layers may go through compiled code; the same masks up to rounding.
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
    def remark(self, pattern: NMPattern) -> str | None:
        if self.hard_forward or self.push_down == "scaled" or pattern.n < 3:
            return None
        return (
            f"the paper's recursion can pick a weight twice at {pattern}; --model.sampler.push_down scaled keeps it "
            "from that, and was far better at 4:8 and 8:16"
        )

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
        return drawn.masked_weight(weight, logits, _Job(pattern, dim, draw, layer, kept_norm, self))

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
class _Job(Job):
    sampler: GumbelTopK

    @override
    def ways(self, weight: Tensor) -> Iterator[Way]:
        terms = self.pattern.m * self.pattern.n
        if self.sampler.compiled and worth_compiling(weight):
            if terms <= _MOST_NATIVE and weight.device.type == "cpu":
                yield self._native(weight)
            if terms <= _MOST_NATIVE and weight.is_cuda:
                yield self._triton(weight)
            if terms <= _MOST_UNROLLED:
                yield _Compiled(self)
        yield _Eager(self)

    def _native(self, weight: Tensor) -> Way:
        columns, kept_norm = columns_of(weight, self.dim), self.kept_norm is not None
        pull, hard = float(self.pull), self.sampler.hard_forward
        return NativeWay(TopKDraw(columns, 0, *self.key, *self.scales, pull, hard, kept_norm), self.pattern)

    def _triton(self, weight: Tensor) -> Way:
        pull = None if self.kept_norm is None else self.kept_norm.pull_on(weight.device)
        columns, hard = columns_of(weight, self.dim), self.sampler.hard_forward
        return TritonWay(self.pattern, columns, self.key, *self.scales, pull, hard)

    @property
    def scales(self) -> tuple[float, float, float]:
        """1/λ, 1/τ, and the factor on log(1 - μ)."""
        over_tau = 1 / self.draw.tau
        return 1 / self.draw.lam, over_tau, 1.0 if self.sampler.push_down == "paper" else over_tau

    def numbers(self, chunk: Chunk, device: torch.device) -> tuple[Tensor, Tensor]:
        """The compiled kernels' `ints` and `floats`."""
        ints = numbers_on(device, [chunk.first, *self.key], torch.int32)
        floats = numbers_on(device, [*self.scales, 0.0], torch.float32)
        floats[3] = self.pull
        return ints, floats

    def keys(self, logits: Tensor, chunk: Chunk) -> Tensor:
        """φ/λ + g of a chunk as [M, groups...]."""
        part = chunk.of(logits)
        index = torch.arange(chunk.first, chunk.first + part.numel(), dtype=torch.int32, device=logits.device)
        noise = gumbel(index, self.key)
        return part.float().div(self.draw.lam).add_(noise.view_as(part)).movedim(1, 0).contiguous()

    def mask(self, keys: Tensor) -> Tensor:
        """The mask of keys (overwritten), fp32 or boolean [M, groups...]."""
        if self.sampler.hard_forward:
            return top_members(keys, self.pattern.n)
        return relaxed_mask(keys, self.pattern.n, self.draw.tau, self.scales[2])


@dataclass(frozen=True)
class _Compiled:
    """Through `torch.compile`; see `drawn.Way`."""

    job: _Job

    def masked_weight(self, weight: Tensor, logits: Tensor, out: Tensor) -> bool:
        job, pattern = self.job, self.job.pattern
        fixed = pattern.m, pattern.n, job.sampler.hard_forward
        for chunk in chunks(weight, pattern, job.dim, compiled=True):
            tensors = chunk.of(logits), chunk.of(weight), chunk.of(out), *job.numbers(chunk, weight.device)
            if not run_compiled(fused.masked_weight, *tensors, *fixed):
                return False
        return True

    def logits_gradient(self, weight: Tensor, logits: Tensor, grad: Tensor, out: Tensor) -> bool:
        job, pattern = self.job, self.job.pattern
        fixed = pattern.m, pattern.n, job.sampler.hard_forward, job.kept_norm is not None
        for chunk in chunks(weight, pattern, job.dim, compiled=True):
            tensors = (chunk.of(x) for x in (logits, weight, grad, out))
            if not run_compiled(fused.logits_gradient, *tensors, *job.numbers(chunk, weight.device), *fixed):
                return False
        return True


@dataclass(frozen=True)
class _Eager:
    """In plain tensor operations, chunk by chunk; see `drawn.Way`."""

    job: _Job

    def masked_weight(self, weight: Tensor, logits: Tensor, out: Tensor) -> bool:
        job = self.job
        for chunk in chunks(weight, job.pattern, job.dim):
            mask = job.mask(job.keys(logits, chunk))
            # The product is taken in fp32 and rounded once to the weight's dtype.
            chunk.members(out).copy_(mask * chunk.members(weight).float())
        return True

    def logits_gradient(self, weight: Tensor, logits: Tensor, grad: Tensor, out: Tensor) -> bool:
        job = self.job
        for chunk in chunks(weight, job.pattern, job.dim):
            members = chunk.members(weight).float()
            of_mask = (chunk.members(grad).float() * members).contiguous()
            keys = job.keys(logits, chunk)
            if job.kept_norm is not None:
                of_mask -= job.pull * job.mask(keys.clone()) * members.square()
            of_keys = relaxed_mask_gradient(keys, of_mask, job.pattern.n, job.draw.tau, job.scales[2])
            chunk.members(out).copy_(of_keys.div_(job.draw.lam))
        return True
