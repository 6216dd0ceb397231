"""RoI's sampler: one logit per weight, masks drawn without replacement by the relaxed Gumbel-Top-K.

`GumbelTopK` passes the relaxed mask on, `StraightThrough` passes the hard top-N of the same keys and lets
the gradient flow through the relaxation. The backward pass draws the same noise again and so keeps nothing
but the logits and the frozen weight, which are alive anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.noise import gumbel, noise_key
from roi_lightning.pattern import NMPattern, top_members
from roi_lightning.samplers.base import Draw, Sampler
from roi_lightning.samplers.reference import PushDown
from roi_lightning.samplers.unrolled import relaxed_mask, relaxed_mask_gradient

# Elements worked on at a time: temporaries stay in the processor's cache, and small beside the layer.
_CPU_CHUNK: Final = 1 << 18
_CUDA_CHUNK: Final = 1 << 24


@dataclass(frozen=True)
class GumbelTopK(Sampler):
    """The paper's relaxation: soft masks in training.

    Args:
        push_down: `paper`, or `scaled` for a push-down divided by τ, which keeps a member from being picked
            twice when N >= 3 (see `relaxed_top_n`).
    """

    push_down: PushDown = "paper"

    @property
    def hard_forward(self) -> bool:
        """Whether the forward pass sees a hard mask."""
        return False

    @override
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern) -> tuple[int, ...]:
        return weight

    @override
    def initial_logits(
        self, noise: Tensor, mask: Tensor | None, strength: float, pattern: NMPattern, dim: int
    ) -> Tensor:
        return noise if mask is None else noise + torch.where(mask, strength, -strength)

    @override
    def masked_weight(
        self, weight: Tensor, logits: Tensor, pattern: NMPattern, dim: int, draw: Draw, layer: str
    ) -> Tensor:
        result = _MaskedWeight.apply(weight, logits, _Job(self, pattern, dim, draw, layer))  # type: ignore[no-untyped-call]
        assert isinstance(result, Tensor)
        return result

    @override
    def hard_mask(self, logits: Tensor, pattern: NMPattern, dim: int) -> Tensor:
        return pattern.top(logits.detach(), dim)


@dataclass(frozen=True)
class StraightThrough(GumbelTopK):
    """Hard masks forward, the relaxation's gradient backward (the paper's Appendix on straight-through).

    Args:
        push_down: As in `GumbelTopK`; concerns the gradient only.
    """

    @property
    @override
    def hard_forward(self) -> bool:
        return True


@dataclass(frozen=True)
class _Job:
    """One layer's draw, cut into chunks of whole groups along the weight's first axis."""

    sampler: GumbelTopK
    pattern: NMPattern
    dim: int
    draw: Draw
    layer: str

    @property
    def push(self) -> float:
        return 1.0 if self.sampler.push_down == "paper" else 1.0 / self.draw.tau

    def chunks(self, weight: Tensor) -> Iterator[slice]:
        rows, columns = weight.shape
        unit = 1 if self.dim == 1 else self.pattern.m
        size = _CUDA_CHUNK if weight.is_cuda else _CPU_CHUNK
        step = max(1, size // (columns * unit)) * unit
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def keys(self, logits: Tensor, rows: slice) -> Tensor:
        """φ/λ + g of some rows as [M, groups...]."""
        columns = logits.shape[1]
        index = torch.arange(
            rows.start * columns, rows.stop * columns, dtype=torch.int32, device=logits.device
        )
        noise = gumbel(index, noise_key(self.draw.seed, self.draw.index, self.layer))
        keys = logits[rows].float().div(self.draw.lam).add_(noise.view(-1, columns))
        return self.members(keys).contiguous()

    def members(self, tensor: Tensor) -> Tensor:
        """[rows, columns] as a view [M, groups...]; `restore` undoes it."""
        return self.pattern.group(tensor, self.dim).movedim(-1, 0)

    def restore(self, members: Tensor) -> Tensor:
        return members.movedim(0, -1).flatten(-2).movedim(-1, self.dim)


class _MaskedWeight(torch.autograd.Function):
    """weight * mask(logits, draw), and the logits' gradient by drawing again."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, logits: Tensor, job: _Job) -> Tensor:
        ctx.save_for_backward(weight, logits)
        ctx.job = job
        out = torch.empty_like(weight)
        for rows in job.chunks(weight):
            keys = job.keys(logits, rows)
            if job.sampler.hard_forward:
                mask = top_members(keys, job.pattern.n)
            else:
                mask = relaxed_mask(keys, job.pattern.n, job.draw.tau, job.push)
            # The product is taken in fp32 and rounded once to the weight's dtype.
            job.members(out[rows]).copy_(mask * job.members(weight[rows]).float())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        weight, logits = ctx.saved_tensors
        job: _Job = ctx.job
        out = torch.empty_like(logits)
        for rows in job.chunks(weight):
            of_mask = job.members(grads[0][rows].float() * weight[rows].float()).contiguous()
            keys = job.keys(logits, rows)
            of_keys = relaxed_mask_gradient(keys, of_mask, job.pattern.n, job.draw.tau, job.push)
            job.members(out[rows]).copy_(of_keys.div_(job.draw.lam))
        return None, out, None
