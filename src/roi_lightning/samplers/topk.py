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
from roi_lightning.samplers import fused, native_draws
from roi_lightning.samplers.base import Draw, Sampler
from roi_lightning.samplers.chunks import Chunk, chunks, worth_compiling
from roi_lightning.samplers.compiling import run_compiled
from roi_lightning.samplers.kept_norm import KeptNorm
from roi_lightning.samplers.native_draws import TopKDraw, columns_of
from roi_lightning.samplers.reference import PushDown
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
        job = _Job(self, pattern, dim, draw, layer, kept_norm)
        result = _MaskedWeight.apply(weight.contiguous(), logits.contiguous(), job)  # type: ignore[no-untyped-call]
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

    def goes_native(self, weight: Tensor) -> bool:
        return weight.device.type == "cpu" and self._compiles(weight, _MOST_NATIVE)

    def goes_compiled(self, weight: Tensor) -> bool:
        return self._compiles(weight, _MOST_UNROLLED)

    def _compiles(self, weight: Tensor, most: int) -> bool:
        return self.sampler.compiled and self.pattern.m * self.pattern.n <= most and worth_compiling(weight)

    @property
    def key(self) -> tuple[int, int]:
        return noise_key(self.draw.seed, self.draw.index, self.layer)

    def native_draw(self, weight: Tensor) -> TopKDraw:
        hard, kept_norm = self.sampler.hard_forward, self.kept_norm is not None
        over_lam, over_tau, columns = 1 / self.draw.lam, 1 / self.draw.tau, columns_of(weight, self.dim)
        return TopKDraw(
            columns, 0, *self.key, over_lam, over_tau, self.push, float(self.pull), hard, kept_norm
        )

    def numbers(self, chunk: Chunk, device: torch.device) -> tuple[Tensor, Tensor]:
        """The kernels' `ints` and `floats`."""
        ints = torch.tensor([chunk.first, *self.key], dtype=torch.int32, device=device)
        known = [1 / self.draw.lam, 1 / self.draw.tau, self.push]
        floats = torch.tensor([*known, 0.0], dtype=torch.float32, device=device)
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
        return relaxed_mask(keys, self.pattern.n, self.draw.tau, self.push)


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
        out = torch.empty_like(logits)
        grad = grads[0].contiguous()
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
    for chunk in chunks(weight, job.pattern, job.dim, compiled=True):
        tensors = chunk.of(logits.detach()), chunk.of(weight.detach()), chunk.of(out)
        numbers, pattern = job.numbers(chunk, weight.device), job.pattern
        if not run_compiled(
            fused.masked_weight, *tensors, *numbers, pattern.m, pattern.n, job.sampler.hard_forward
        ):
            return False
    return True


def _compiled_backward(out: Tensor, weight: Tensor, logits: Tensor, grad: Tensor, job: _Job) -> bool:
    if not job.goes_compiled(weight):
        return False
    for chunk in chunks(weight, job.pattern, job.dim, compiled=True):
        tensors = (chunk.of(x.detach()) for x in (logits, weight, grad, out))
        numbers, pattern = job.numbers(chunk, weight.device), job.pattern
        fixed = pattern.m, pattern.n, job.sampler.hard_forward, job.kept_norm is not None
        if not run_compiled(fused.logits_gradient, *tensors, *numbers, *fixed):
            return False
    return True


def _eager_forward(out: Tensor, weight: Tensor, logits: Tensor, job: _Job) -> bool:
    for chunk in chunks(weight, job.pattern, job.dim):
        mask = job.mask(job.keys(logits, chunk))
        # The product is taken in fp32 and rounded once to the weight's dtype.
        chunk.members(out).copy_(mask * chunk.members(weight).float())
    return True


def _eager_backward(out: Tensor, weight: Tensor, logits: Tensor, grad: Tensor, job: _Job) -> bool:
    for chunk in chunks(weight, job.pattern, job.dim):
        members = chunk.members(weight).float()
        of_mask = (chunk.members(grad).float() * members).contiguous()
        keys = job.keys(logits, chunk)
        if job.kept_norm is not None:
            of_mask -= job.pull * job.mask(keys.clone()) * members.square()
        of_keys = relaxed_mask_gradient(keys, of_mask, job.pattern.n, job.draw.tau, job.push)
        chunk.members(out).copy_(of_keys.div_(job.draw.lam))
    return True
