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
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.noise import gumbel, noise_key
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import fused_categorical, native_draws
from roi_lightning.samplers.base import Draw, Sampler
from roi_lightning.samplers.candidates import members_of, shares, soft_mask, soft_mask_gradient
from roi_lightning.samplers.chunks import by_group, chunk_size, worth_compiling
from roi_lightning.samplers.compiling import run_compiled
from roi_lightning.samplers.kept_norm import KeptNorm
from roi_lightning.samplers.native_draws import CategoricalDraw, columns_of

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
                f"group (at most {_MOST_CANDIDATES:,}); GumbelTopK needs only {pattern.m} logits per group"
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
        job = _Job(pattern, dim, draw, layer, self.compiled, kept_norm)
        result = _MaskedWeight.apply(weight.contiguous(), logits.contiguous(), job)  # type: ignore[no-untyped-call]
        assert isinstance(result, Tensor)
        return result

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
class _Job:
    """One layer's draw."""

    pattern: NMPattern
    dim: int
    draw: Draw
    layer: str
    compiled: bool
    kept_norm: KeptNorm | None

    @property
    def pull(self) -> Tensor | float:
        return 0.0 if self.kept_norm is None else self.kept_norm.pull()

    @property
    def key(self) -> tuple[int, int]:
        return noise_key(self.draw.seed, self.draw.index, self.layer)

    def goes_native(self, weight: Tensor) -> bool:
        return weight.device.type == "cpu" and self._compiles(weight, _MOST_NATIVE)

    def goes_compiled(self, weight: Tensor) -> bool:
        return self._compiles(weight, _MOST_UNROLLED)

    def _compiles(self, weight: Tensor, most: int) -> bool:
        return self.compiled and comb(self.pattern.m, self.pattern.n) <= most and worth_compiling(weight)

    def native_draw(self, weight: Tensor) -> CategoricalDraw:
        columns, groups = columns_of(weight, self.dim), weight.numel() // self.pattern.m
        over_lam, over_tau, kept_norm = 1 / self.draw.lam, 1 / self.draw.tau, self.kept_norm is not None
        return CategoricalDraw(columns, groups, *self.key, over_lam, over_tau, float(self.pull), kept_norm)

    def views(self, logits: Tensor, *weights: Tensor) -> list[Tensor]:
        """Logits as [C, A, B], tensors of the weight's shape as [A, M, B]."""
        groups = [by_group(weight.detach(), self.pattern.m, self.dim) for weight in weights]
        return [_by_candidate(logits.detach(), groups[0]), *groups]

    def numbers(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The kernels' `ints` and `floats`."""
        ints = torch.tensor([_first(logits, part), *self.key], dtype=torch.int32, device=logits.device)
        known = [1 / self.draw.lam, 1 / self.draw.tau, 0.0]
        floats = torch.tensor(known, dtype=torch.float32, device=logits.device)
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


class _MaskedWeight(torch.autograd.Function):
    """weight * mask(logits, draw), and the logits' gradient by drawing again."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, logits: Tensor, job: _Job) -> Tensor:
        ctx.save_for_backward(weight, logits)
        ctx.job = job
        out = torch.empty_like(weight)
        ways = _native_forward, _compiled_forward, _eager_forward
        next(way for way in ways if way(out, weight, logits, job))
        if job.kept_norm is not None:
            job.kept_norm.add(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        weight, logits = ctx.saved_tensors
        job: _Job = ctx.job
        out, grad = torch.empty_like(logits), grads[0].contiguous()
        ways = _native_backward, _compiled_backward, _eager_backward
        next(way for way in ways if way(out, weight, logits, grad, job))
        return None, out, None


# Ways to do the same, the fastest first; each says whether it did it.


def _native_forward(out: Tensor, weight: Tensor, logits: Tensor, job: _Job) -> bool:
    if not job.goes_native(weight):
        return False
    return native_draws.masked_weight(job.native_draw(weight), logits, weight, out, job.pattern)


def _native_backward(out: Tensor, weight: Tensor, logits: Tensor, grad: Tensor, job: _Job) -> bool:
    if not job.goes_native(weight):
        return False
    return native_draws.logits_gradient(job.native_draw(weight), logits, weight, grad, out, job.pattern)


def _compiled_forward(out: Tensor, weight: Tensor, logits: Tensor, job: _Job) -> bool:
    if not job.goes_compiled(weight):
        return False
    logits, weight, out = job.views(logits, weight, out)
    for part in _slices(logits, compiled=True):
        tensors = logits[:, part], weight[part], out[part], *job.numbers(logits, part)
        if not run_compiled(fused_categorical.masked_weight, *tensors, job.pattern.m, job.pattern.n):
            return False
    return True


def _compiled_backward(out: Tensor, weight: Tensor, logits: Tensor, grad: Tensor, job: _Job) -> bool:
    if not job.goes_compiled(weight):
        return False
    fixed = job.pattern.m, job.pattern.n, job.kept_norm is not None
    logits, weight, grad = job.views(logits, weight, grad)
    out = out.view(logits.shape)
    for part in _slices(logits, compiled=True):
        tensors = logits[:, part], weight[part], grad[part], out[:, part]
        if not run_compiled(fused_categorical.logits_gradient, *tensors, *job.numbers(logits, part), *fixed):
            return False
    return True


def _eager_forward(out: Tensor, weight: Tensor, logits: Tensor, job: _Job) -> bool:
    logits, weight, out = job.views(logits, weight, out)
    for part in _slices(logits):
        mask = soft_mask(job.shares(logits, part), job.pattern)
        # The product is taken in fp32 and rounded once to the weight's dtype.
        out[part] = (mask * weight[part].movedim(1, 0).float()).movedim(0, 1)
    return True


def _eager_backward(out: Tensor, weight: Tensor, logits: Tensor, grad: Tensor, job: _Job) -> bool:
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
