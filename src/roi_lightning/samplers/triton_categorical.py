"""MaskLLM's sampler in one pass over memory each way, in Triton: the arithmetic of `eager`.

A program works on TILE groups. A candidate's keys of all of them lie next to each other, one vector of the tile.
"""

import triton
import triton.language as tl

from roi_lightning.samplers.triton_kernels import (
    MIN_EXPONENT,
    candidate,
    count,
    gumbel,
    jit,
    offsets,
    temperatures,
)


@jit
def masked_weight(
    logits,
    weight,
    out,
    numbers,
    groups,
    first,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write weight * mask into `out`."""
    offset, inside, element = offsets(groups, M, WIDTH, TILE)
    over_lam, over_tau = temperatures(numbers)
    probabilities = _probabilities(logits, numbers, groups, first, over_lam, over_tau, M, N, TILE)
    mask = _mask(probabilities, element, M, N)
    value = tl.load(weight + offset, inside, 0.0)
    tl.store(out + offset, (value.to(tl.float32) * mask).to(value.dtype, fp_downcast_rounding="rtne"), inside)


@jit
def logits_gradient(
    logits,
    weight,
    grad,
    out,
    numbers,
    groups,
    first,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradient of the logits into `out`."""
    offset, inside, element = offsets(groups, M, WIDTH, TILE)
    over_lam, over_tau = temperatures(numbers)
    probabilities = _probabilities(logits, numbers, groups, first, over_lam, over_tau, M, N, TILE)
    mask = _mask(probabilities, element, M, N)
    value = tl.load(weight + offset, inside, 0.0).to(tl.float32)
    of_mask = tl.load(grad + offset, inside, 0.0).to(tl.float32) * value
    mean = tl.sum(of_mask * mask, 1)  # of what the candidates' gradients are
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = out + group
    for c in tl.static_range(count(M, N)):
        ahead = tl.sum(of_mask * candidate(element, c, M, N), 1) - mean
        tl.store(place, probabilities[c] * ahead * over_tau * over_lam, group < groups)
        place += groups


@triton.jit
def _probabilities(
    logits,
    numbers,
    groups,
    first,
    over_lam,
    over_tau,
    M: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each candidate's, softmax(keys / τ); NaN in all of a group where a logit is NaN or infinite."""
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place, total = logits + group, tl.zeros((TILE,), tl.float32)
    best = total - float("inf")
    keys, odds, probabilities = (), (), ()
    for c in tl.static_range(count(M, N)):
        logit = tl.load(place, group < groups, 0.0)
        key = logit * over_lam + gumbel(((group + first) * count(M, N) + c).to(tl.uint32), numbers)
        keys, best = keys + (key,), tl.maximum(best, key)
        total += key - key
        place += groups
    for c in tl.static_range(count(M, N)):
        e = tl.exp(tl.maximum((keys[c] - best) * over_tau, MIN_EXPONENT))
        odds = odds + (e,)
        total += e
    for c in tl.static_range(count(M, N)):
        probabilities = probabilities + (odds[c] / total,)
    return probabilities


@triton.jit
def _mask(probabilities, element, M: tl.constexpr, N: tl.constexpr):
    """Σ_c p_c · candidate_c."""
    mask = probabilities[0][:, None] * candidate(element, 0, M, N)
    for c in tl.static_range(1, count(M, N)):
        mask += probabilities[c][:, None] * candidate(element, c, M, N)
    return mask
