"""MaskLLM's sampler: one logit per candidate mask of a group, a softmax over all C(M, N) of them.

The candidates are the N-subsets of a group in lexicographic order. With κ = 1/λ and standard Gumbel noise g, a
draw gives candidate c the share p_c = softmax((κ φ + g) / τ)_c and the group the mask Σ_c p_c · candidate_c,
soft at all times; the hard mask is the candidate of the largest logit. Logits lie candidate-major, [C, out, in/M]
(or [C, in/M, out] where the weight is [in, out]), so that every pass runs along groups.

At 1:M the candidates are the members, and this is the same thing as `GumbelTopK`, draw by draw. As there, the
backward pass draws again and keeps nothing but the logits and the frozen weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.noise import gumbel
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import drawn, fused_categorical
from roi_lightning.samplers.base import Draw, Sampler
from roi_lightning.samplers.candidates import members_of, shares, soft_mask, soft_mask_gradient
from roi_lightning.samplers.chunks import by_group, chunk_size, worth_compiling
from roi_lightning.samplers.compiling import numbers_on, run_compiled
from roi_lightning.samplers.drawn import Job, Way
from roi_lightning.samplers.kept_norm import KeptNorm
from roi_lightning.samplers.native_draws import CategoricalDraw, NativeWay, columns_of

_MOST_CANDIDATES: Final = 20_000
# By torch.compile, 28 of 2:8 take some twenty seconds each way, 70 of 4:8 a minute; a C++ compiler a second or two.
_MOST_UNROLLED: Final = 32
_MOST_NATIVE: Final = 512


@dataclass(frozen=True)
class Categorical(Sampler):
    """MaskLLM's relaxation: soft masks in training.

    Args:
        compiled: Whether large layers may go through compiled code; the same masks up to rounding.
    """

    method = "maskllm"

    compiled: bool = True

    @override
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern, dim: int) -> tuple[int, ...]:
        """One logit per candidate of every group: [C, out, in/M], or [C, in/M, out] with `dim` 0.

        Raises:
            UserError: If the pattern has more than 20,000 candidates.
        """
        count = comb(pattern.m, pattern.n)
        if count > _MOST_CANDIDATES:
            raise UserError(
                f"pattern {pattern} has {count:,} candidate masks, and Categorical learns a logit for each, in every "
                f"group (at most {_MOST_CANDIDATES:,}); use GumbelTopK, which needs only {pattern.m}"
            )
        groups = [size // pattern.m if axis == dim else size for axis, size in enumerate(weight)]
        return (count, *groups)

    @override
    def initial_logits(
        self, noise: Tensor, mask: Tensor | None, strength: float, pattern: NMPattern, dim: int
    ) -> Tensor:
        """Noise, plus `strength` * (2 * overlap - N) with the overlap of candidate and prior mask.

        MaskLLM adds α σ (overlap - N/2), σ the noise's standard deviation: the same with `strength` α σ / 2, 0.015
        for its α = 3 and σ = 0.01.
        """
        if mask is None:
            return noise
        logits = noise.clone()
        kept = by_group(mask.contiguous(), pattern.m, dim)
        parts = _by_candidate(logits, kept)
        for part, candidate in zip(parts, combinations(range(pattern.m), pattern.n), strict=True):
            overlap = kept[:, list(candidate)].sum(1)
            part.add_(2 * overlap - pattern.n, alpha=strength)
        return logits

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
        return drawn.masked_weight(weight, logits, _Job(pattern, dim, draw, layer, kept_norm, self.compiled))

    @override
    def hard_mask(self, logits: Tensor, pattern: NMPattern, dim: int) -> Tensor:
        """The candidate of the largest logit; among equals the earlier one."""
        best = logits[0].detach().clone()
        chosen = torch.zeros(best.shape, dtype=torch.int32, device=best.device)
        for c, candidate in enumerate(logits.detach()):
            chosen.masked_fill_(candidate > best, c)
            torch.maximum(best, candidate, out=best)
        kept = members_of(pattern, logits.device)
        keeps = torch.zeros(len(kept), pattern.m, dtype=torch.bool, device=logits.device)
        members = keeps.scatter_(1, kept, value=True)[chosen]
        return members.movedim(-1, dim + 1).flatten(dim, dim + 1)

    @override
    def choices(self, logits: Tensor, pattern: NMPattern, dim: int) -> Tensor:
        return logits.movedim(0, -1)

    @override
    def picks(self, pattern: NMPattern) -> int:
        return 1


def _by_candidate(logits: Tensor, groups: Tensor) -> Tensor:
    """Contiguous logits as [C, A, B], beside the weight's [A, M, B]."""
    return logits.view(len(logits), len(groups), groups.shape[2])


def _slices(logits: Tensor, compiled: bool = False) -> Iterator[slice]:
    """Nearly equal slices of the middle axis of [C, A, B].

    At least two: a slice then never has the strides of the whole, for which code would be compiled again.
    """
    length = logits.shape[1]
    count = min(length, max(2, -(-logits.numel() // chunk_size(logits, compiled))))
    for i in range(count):
        yield slice(i * length // count, (i + 1) * length // count)


@dataclass(frozen=True)
class _Job(Job):
    compiled: bool

    @override
    def ways(self, weight: Tensor) -> Iterator[Way]:
        count = comb(self.pattern.m, self.pattern.n)
        if self.compiled and worth_compiling(weight):
            if count <= _MOST_NATIVE and weight.device.type == "cpu":
                yield self._native(weight)
            if count <= _MOST_UNROLLED:
                yield _Compiled(self)
        yield _Eager(self)

    def _native(self, weight: Tensor) -> Way:
        columns, groups = columns_of(weight, self.dim), weight.numel() // self.pattern.m
        over_lam, over_tau, kept_norm = 1 / self.draw.lam, 1 / self.draw.tau, self.kept_norm is not None
        numbers = columns, groups, *self.key, over_lam, over_tau, float(self.pull), kept_norm
        return NativeWay(CategoricalDraw(*numbers), self.pattern)

    def views(self, logits: Tensor, *weights: Tensor) -> list[Tensor]:
        """Logits as [C, A, B], tensors of the weight's shape as [A, M, B]."""
        groups = [by_group(weight, self.pattern.m, self.dim) for weight in weights]
        return [_by_candidate(logits, groups[0]), *groups]

    def numbers(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The compiled kernels' `ints` and `floats`."""
        ints = numbers_on(logits.device, [_first(logits, part), *self.key], torch.int32)
        known = [1 / self.draw.lam, 1 / self.draw.tau, 0.0]
        floats = numbers_on(logits.device, known, torch.float32)
        floats[2] = self.pull
        return ints, floats

    def shares(self, logits: Tensor, part: slice) -> Tensor:
        """Shares of a slice of the groups, fp32 [C, a, B]."""
        own = logits[:, part]
        count, rows, columns = own.shape
        groups = torch.arange(rows * columns, dtype=torch.int32, device=logits.device).view(rows, columns)
        among = torch.arange(count, dtype=torch.int32, device=logits.device).view(-1, 1, 1)
        noise = gumbel(groups * count + _first(logits, part) + among, self.key)
        return shares(noise.add_(own / self.draw.lam), self.draw.tau)


def _first(logits: Tensor, part: slice) -> int:
    """The noise index of a slice's first number, wrapped to int32 as the others are."""
    first: int = part.start * logits.shape[2] * len(logits)
    return (first + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass(frozen=True)
class _Compiled:
    """Through `torch.compile`; see `drawn.Way`."""

    job: _Job

    def masked_weight(self, weight: Tensor, logits: Tensor, out: Tensor) -> bool:
        job, pattern = self.job, self.job.pattern
        logits, weight, out = job.views(logits, weight, out)
        for part in _slices(logits, compiled=True):
            tensors = logits[:, part], weight[part], out[part], *job.numbers(logits, part)
            if not run_compiled(fused_categorical.masked_weight, *tensors, pattern.m, pattern.n):
                return False
        return True

    def logits_gradient(self, weight: Tensor, logits: Tensor, grad: Tensor, out: Tensor) -> bool:
        job, pattern = self.job, self.job.pattern
        fixed = pattern.m, pattern.n, job.kept_norm is not None
        logits, weight, grad = job.views(logits, weight, grad)
        out = out.view(logits.shape)
        for part in _slices(logits, compiled=True):
            tensors = logits[:, part], weight[part], grad[part], out[:, part], *job.numbers(logits, part)
            if not run_compiled(fused_categorical.logits_gradient, *tensors, *fixed):
                return False
        return True


@dataclass(frozen=True)
class _Eager:
    """In plain tensor operations, slice by slice; see `drawn.Way`."""

    job: _Job

    def masked_weight(self, weight: Tensor, logits: Tensor, out: Tensor) -> bool:
        logits, weight, out = self.job.views(logits, weight, out)
        for part in _slices(logits):
            mask = soft_mask(self.job.shares(logits, part), self.job.pattern)
            # The product is taken in fp32 and rounded once to the weight's dtype.
            out[part] = (mask * weight[part].movedim(1, 0).float()).movedim(0, 1)
        return True

    def logits_gradient(self, weight: Tensor, logits: Tensor, grad: Tensor, out: Tensor) -> bool:
        job = self.job
        logits, weight, grad = job.views(logits, weight, grad)
        out = out.view(logits.shape)
        for part in _slices(logits):
            members = weight[part].movedim(1, 0).float()
            of_mask = grad[part].movedim(1, 0).float() * members
            share = job.shares(logits, part)
            if job.kept_norm is not None:
                of_mask -= job.pull * soft_mask(share, job.pattern) * members.square()
            of_keys = soft_mask_gradient(share, of_mask, job.draw.tau, job.pattern)
            out[:, part] = of_keys.div_(job.draw.lam)
        return True
