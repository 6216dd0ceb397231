"""The relaxed masks in plain tensor operations, differentiable by autograd.

Elements, or candidates, of a group lie along the first axis, groups along the second: reductions over a last axis of
a few values cost an order of magnitude more than passes over long rows.
"""

from functools import cache
from itertools import combinations
from typing import Any, Final

import torch
from torch import Tensor

# Beyond this lead, the odds are capped, and log(1 - μ) makes up for it; the others' shares are below 1e-17 there.
MAX_LEAD: Final = 40.0
# A choice further behind than this counts as this far: shares of 1e-11 are below fp32's rounding, and exponents that
# make denormal numbers cost a CPU a hundred times as much as others.
MIN_EXPONENT: Final = -25.0
NEVER: Final = -1e30  # stands for the key -inf, of a choice that is never taken


def recursive_mask(keys: Tensor, n: int, tau: float, push: float) -> Tensor:
    """N softmaxes, each pushing down what it picked: `reference.relaxed_top_n`, faster.

    With odds e to the second largest key, only one element, the leader, can have e > 1. Summing e without it gives
    T >= 1, free of cancellation, so the leader's log(1 - μ) = log T - log(sum of e) stays finite however large its
    lead. Every other element has μ <= 1/2, where log(1 - μ) is safe.

    Args:
        keys: φ/λ + g, [M, groups], fp32 or fp64.
        n: Picks per group.
        tau: Softmax temperature τ.
        push: Factor on log(1 - μ): 1 in the paper.

    Returns:
        [M, groups], summing to N along the first axis.
    """
    exponents, odds, mask = _pick(keys, tau)
    shares = mask
    for _ in range(n - 1):
        leads = odds > 1
        rest = odds.masked_fill(leads, 0).sum(0)
        leader = rest.log() - odds.sum(0).log() - (exponents - MAX_LEAD).clamp(min=0)
        down = torch.where(leads, leader, (1 - shares.clamp(max=0.5)).log())
        keys = keys.add(down, alpha=push)
        exponents, odds, shares = _pick(keys, tau)
        mask = mask + shares
    return mask


def _pick(keys: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """One softmax: exponents and odds, relative to the second largest key, and shares μ."""
    exponents = (keys - _second_largest(keys.detach())) / tau
    odds = exponents.clamp(_lowest(keys), MAX_LEAD).exp()
    return exponents, odds, _shares(odds)


def _second_largest(keys: Tensor) -> Tensor:
    first, second = torch.maximum(keys[0], keys[1]), torch.minimum(keys[0], keys[1])
    for key in keys[2:]:
        second = torch.maximum(second, torch.minimum(first, key))
        first = torch.maximum(first, key)
    return second


def mixed_mask(scores: Tensor, n: int, m: int, tau: float) -> Tensor:
    """Σ_c softmax(scores / τ)_c · candidate_c.

    Args:
        scores: Of the candidate masks, [C, groups], fp32 or fp64.
        n: Elements a candidate keeps.
        m: Elements of a group.
        tau: Softmax temperature τ.

    Returns:
        [M, groups], summing to N along the first axis.
    """
    exponents = (scores - scores.detach().amax(0)) / tau
    shares = _shares(exponents.clamp(_lowest(scores)).exp())
    keeping = _keeping(n, m, scores.device)
    return torch.stack([shares.index_select(0, those).sum(0) for those in keeping])


def candidate_sums(keys: Tensor, n: int) -> Tensor:
    """The sum of the keys [M, groups] that each candidate keeps, [C, groups]."""
    first, *others = candidates(n, len(keys), keys.device).T
    scores = keys.index_select(0, first)
    for elements in others:
        scores = scores + keys.index_select(0, elements)
    return scores


@cache
def candidates(n: int, m: int, device: torch.device) -> Tensor:
    """The elements each candidate keeps, int64 [C, N], candidates in lexicographic order."""
    return torch.tensor(list(combinations(range(m), n)), device=device)


@cache
def _keeping(n: int, m: int, device: torch.device) -> Tensor:
    """The candidates that keep each element, int64 [M, C * N / M]."""
    kept = candidates(n, m, device)
    return torch.stack([(kept == i).any(1).nonzero().squeeze(1) for i in range(m)])


def _lowest(keys: Tensor) -> float:
    return MIN_EXPONENT if keys.dtype == torch.float32 else -torch.inf


def _shares(odds: Tensor) -> Tensor:
    shares: Tensor = _Shares.apply(odds)  # type: ignore[no-untyped-call]
    return shares


class _Shares(torch.autograd.Function):
    """Odds over their sum, with a gradient that subtracts before it divides.

    Autograd's gradient of a quotient divides first: where one share is nearly all, only rounding would be left.
    """

    @staticmethod
    def forward(ctx: Any, odds: Tensor) -> Tensor:
        total = odds.sum(0)
        shares = odds / total
        ctx.save_for_backward(shares, total)
        return shares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        shares, total = ctx.saved_tensors
        gradient: Tensor = (grads[0] - (shares * grads[0]).sum(0)) / total
        return gradient
