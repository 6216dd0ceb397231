"""RoI's sampler in plain tensor operations: the fallback of every device, chunk by chunk.

Legend: M = elements of a group, along the first axis, N = picks, E = groups; all tensors fp32. Reductions over a
last axis of size M cost an order of magnitude more than passes over M long rows, hence the layout. The gradient is
written out by hand: it needs nothing but the keys, where autograd would keep every intermediate.

With β = α/τ, s the second largest β and e = exp(β - s), only one element, the leader, can have e > 1. Summing
e without it gives T >= 1, free of cancellation, so the leader's log(1 - μ) = log T - log(sum of e) stays finite
however large its lead; every other element has μ <= 1/2, where log(1 - μ) is safe:
it is added to keys whose own rounding is coarser.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from roi_lightning.masks.pattern import top_members
from roi_lightning.samplers.base import DrawArgs
from roi_lightning.samplers.noise import gumbel

# Beyond this lead, e is capped, and log(1 - μ) makes up for it; the others' probabilities are below 1e-17 there.
MAX_LEAD: Final = 40.0
# An element further behind than this counts as this far: probabilities of 1e-11 are below fp32's rounding, and
# exponents that make denormal numbers cost a CPU a hundred times as much as others.
MIN_EXPONENT: Final = -25.0
# Elements worked on at a time: temporaries stay in the CPU's cache, and small beside the layer.
_CPU_CHUNK: Final = 1 << 18
_CUDA_CHUNK: Final = 1 << 24


def masked_weight(weight: Tensor, logits: Tensor, args: DrawArgs, out: Tensor) -> bool:
    """Write weight * mask into `out`; see `dispatch.Kernel`."""
    for rows in row_chunks(weight):
        mask = _mask(noisy_keys(logits, rows, args), args)
        # The product is taken in fp32 and rounded once to the weight's dtype.
        elements_of(out[rows], args).copy_(mask * elements_of(weight[rows], args).float())
    return True


def logits_gradient(
    weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, args: DrawArgs, out: Tensor
) -> bool:
    """Write the gradient of the logits into `out`; see `dispatch.Kernel`."""
    for rows in row_chunks(weight):
        elements = elements_of(weight[rows], args).float()
        of_mask = (elements_of(grad[rows], args).float() * elements).contiguous()
        keys = noisy_keys(logits, rows, args)
        if args.kept_norm:
            of_mask -= factor * _mask(keys.clone(), args) * elements.square()
        of_keys = relaxed_mask_gradient(keys, of_mask, args.n, args.tau, args.push)
        elements_of(out[rows], args).copy_(of_keys.div_(args.lam))
    return True


def chunk_size(tensor: Tensor) -> int:
    """How many elements to work on at a time where this tensor is."""
    return _CUDA_CHUNK if tensor.is_cuda else _CPU_CHUNK


def row_chunks(weight: Tensor) -> Iterator[slice]:
    """Rows of a weight to work on at a time."""
    step = max(1, chunk_size(weight) // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def elements_of(rows: Tensor, args: DrawArgs) -> Tensor:
    """Contiguous rows of a weight as a view [M, E]."""
    return rows.view(-1, args.m).T


def noisy_keys(logits: Tensor, rows: slice, args: DrawArgs) -> Tensor:
    """φ/λ + g of some rows, [M, E]."""
    part, first = logits[rows], rows.start * logits.shape[1]
    index = torch.arange(first, first + part.numel(), dtype=torch.int32, device=logits.device)
    noise = gumbel(index, (args.key0, args.key1))
    return elements_of(part.div(args.lam).add_(noise.view_as(part)), args).contiguous()


def _mask(keys: Tensor, args: DrawArgs) -> Tensor:
    """The mask of keys (overwritten), fp32 or boolean [M, E]."""
    if args.hard:
        return top_members(keys, args.n)
    return relaxed_mask(keys, args.n, args.tau, args.push)


@dataclass(frozen=True)
class _Pick:
    """One softmax of the recursion.

    Attributes:
        mu: Probabilities μ, [M, E].
        others: min(e, 1), 0 for the leader, [M, E].
        leads: 1 for the leader, else 0, [M, E].
        rest: T, [E]; of no use where the two largest are equal, for nobody leads there.
        leader_log: The leader's log(1 - μ), [E].
    """

    mu: Tensor
    others: Tensor
    leads: Tensor
    rest: Tensor
    leader_log: Tensor


def relaxed_mask(keys: Tensor, n: int, tau: float, push: float) -> Tensor:
    """The relaxed mask of perturbed keys.

    Args:
        keys: φ/λ + g, [M, E] fp32; overwritten.
        n: Picks per group.
        tau: Softmax temperature τ.
        push: Factor on log(1 - μ): 1 in the paper.

    Returns:
        [M, E], summing to N along the first axis.
    """
    mask: Tensor | None = None
    for k in range(n):
        pick = _pick(keys, tau)
        if k < n - 1:
            keys.add_(_push_down(pick), alpha=push)
        mask = pick.mu if mask is None else mask.add_(pick.mu)
    assert mask is not None
    return mask


def relaxed_mask_gradient(keys: Tensor, grad: Tensor, n: int, tau: float, push: float) -> Tensor:
    """The gradient of <mask, grad> with respect to the keys.

    Args:
        keys: As given to `relaxed_mask`, [M, E]; overwritten.
        grad: Of the mask, [M, E].
        n: Picks per group.
        tau: Softmax temperature τ.
        push: As in `relaxed_mask`.

    Returns:
        [M, E].
    """
    picks = []
    for k in range(n):
        picks.append(_pick(keys, tau))
        if k < n - 1:
            keys.add_(_push_down(picks[-1]), alpha=push)
    total = _softmax_gradient(picks[-1].mu, grad).div_(tau)
    for pick in reversed(picks[:-1]):
        through_push = _push_down_gradient(pick, total)
        step = _softmax_gradient(pick.mu, grad).add_(through_push, alpha=push)
        total.add_(step, alpha=1.0 / tau)
    return total


def _pick(keys: Tensor, tau: float) -> _Pick:
    first, second = _two_largest(keys)
    lowest = MIN_EXPONENT if keys.dtype == torch.float32 else None
    e = keys.sub(second).div_(tau).clamp_(lowest, MAX_LEAD).exp_()
    leads = e.gt(1.0).to(e.dtype)
    others = e.clamp(max=1.0).sub_(leads)
    total = e.sum(0)
    rest = others.sum(0)
    lead = first.sub_(second).div_(tau).sub_(MAX_LEAD).clamp_(min=0.0)
    leader_log = rest.log().sub_(total.log()).sub_(lead)
    return _Pick(e.div_(total), others, leads, rest, leader_log)


def _two_largest(keys: Tensor) -> tuple[Tensor, Tensor]:
    first = torch.maximum(keys[0], keys[1])
    second = torch.minimum(keys[0], keys[1])
    for key in keys[2:]:
        second = torch.maximum(second, torch.minimum(first, key))
        first = torch.maximum(first, key)
    return first, second


def _push_down(pick: _Pick) -> Tensor:
    others = pick.mu.clamp(max=0.5).neg_().add_(1.0).log_()
    return others.lerp_(pick.leader_log.expand_as(others), pick.leads)


def _softmax_gradient(mu: Tensor, grad: Tensor) -> Tensor:
    return grad.sub((mu * grad).sum(0)).mul_(mu)


def _push_down_gradient(pick: _Pick, grad: Tensor) -> Tensor:
    mu, leads = pick.mu, pick.leads
    # μ/(1 - μ) of the others; for the leader, whose odds may overflow, μ.
    odds = mu.mul(leads).sub_(mu).add_(1.0).reciprocal_().mul_(mu).mul_(grad)
    leader = odds.mul(leads).sum(0)
    rest = odds.sum(0).sub_(leader)
    return pick.others.mul(leader.div_(pick.rest)).addcmul_(mu, rest).sub_(odds)
