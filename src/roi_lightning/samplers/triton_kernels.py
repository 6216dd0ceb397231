"""RoI's sampler in one pass over memory each way, in Triton: the arithmetic of `eager`, many groups at a time.

With SUBSET it goes over whole masks, candidate by candidate. A tile is [groups, elements], elements padded to a power
of two.
"""

from itertools import combinations

import triton
import triton.language as tl

from roi_lightning.samplers.eager import MAX_LEAD as _MAX_LEAD
from roi_lightning.samplers.eager import MIN_EXPONENT as _MIN_EXPONENT
from roi_lightning.samplers.noise import MIX_A, MIX_B

A = tl.constexpr(MIX_A & 0xFFFFFFFF)
B = tl.constexpr(MIX_B & 0xFFFFFFFF)
MAX_LEAD = tl.constexpr(_MAX_LEAD)
MIN_EXPONENT = tl.constexpr(_MIN_EXPONENT)
TINY = tl.constexpr(1.17549435e-38)
BEHIND = tl.constexpr(-3e38)
# Of a shard: a kernel of its own for places that are multiples of 16 would be one more to compile.
jit = triton.jit(do_not_specialize=["first"])


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
    HARD: tl.constexpr,
    SCALED: tl.constexpr,
    SUBSET: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write weight * mask into `out`; the mask is a relaxed one, or the hard top-N of its keys."""
    offset, inside, element = offsets(groups, M, WIDTH, TILE)
    over_lam, over_tau = temperatures(numbers)
    push = over_tau if SCALED else 1.0
    key = _keys(logits, offset, inside, element, numbers, first, over_lam, M)
    if HARD:
        mask = _hard_mask(key, element, N, WIDTH)
    elif SUBSET:
        mask = _subset_mask(key, over_tau, element, M, N, WIDTH)
    else:
        mask = _soft_mask(_all_keys(key, over_tau, push, element, M, N), over_tau, element, M)
    mask += tl.where(element < M, key - key, 0.0)  # NaN and infinite logits must show
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
    HARD: tl.constexpr,
    SCALED: tl.constexpr,
    SUBSET: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradient of the logits into `out`."""
    offset, inside, element = offsets(groups, M, WIDTH, TILE)
    over_lam, over_tau = temperatures(numbers)
    push = over_tau if SCALED else 1.0
    key = _keys(logits, offset, inside, element, numbers, first, over_lam, M)
    value = tl.load(weight + offset, inside, 0.0).to(tl.float32)
    of_mask = tl.load(grad + offset, inside, 0.0).to(tl.float32) * value
    if SUBSET:
        mask = _subset_mask(key, over_tau, element, M, N, WIDTH)
        of_keys = _subset_gradient(key, mask, of_mask, over_tau, element, M, N, WIDTH)
    else:
        keys = _all_keys(key, over_tau, push, element, M, N)
        of_keys = _picks_gradient(keys, of_mask, over_tau, push, element, M, N)
    tl.store(out + offset, of_keys * over_lam, inside)


@triton.jit
def _picks_gradient(keys, of_mask, over_tau, push, element, M: tl.constexpr, N: tl.constexpr):
    total = tl.zeros_like(of_mask)
    for k in tl.static_range(N - 1, -1, -1):
        mu, others, leads, rest, _ = _pick(keys[k], over_tau, element, M)
        step = (of_mask - tl.sum(mu * of_mask, 1)[:, None]) * mu
        if k < N - 1:
            # μ/(1 - μ) of the others; for the leader, whose odds may overflow, μ.
            through = tl.where(leads, mu, mu / (1.0 - tl.minimum(mu, 0.75))) * total
            leader = tl.sum(tl.where(leads, through, 0.0), 1) / rest
            rest_through = tl.sum(tl.where(leads, 0.0, through), 1)
            step += (others * leader[:, None] + mu * rest_through[:, None] - through) * push
        total += step * over_tau
    return total


@triton.jit
def _subset_mask(key, over_tau, element, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """Σ_c p_c · candidate_c."""
    best = tl.sum(key * _hard_mask(key, element, N, WIDTH), 1)
    total, mask = tl.zeros_like(best), tl.zeros_like(key)
    for c in tl.static_range(count(M, N)):
        kept = candidate(element, c, M, N)
        e = _odds(key, kept, best, over_tau)
        total += e
        mask += e[:, None] * kept
    return mask / total[:, None]


@triton.jit
def _subset_gradient(
    key, mask, of_mask, over_tau, element, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr
):
    best = tl.sum(key * _hard_mask(key, element, N, WIDTH), 1)
    mean = tl.sum(of_mask * mask, 1)  # of what the candidates' gradients are
    total, of_keys = tl.zeros_like(best), tl.zeros_like(key)
    for c in tl.static_range(count(M, N)):
        kept = candidate(element, c, M, N)
        e = _odds(key, kept, best, over_tau)
        total += e
        of_keys += (e * (tl.sum(of_mask * kept, 1) - mean))[:, None] * kept
    return of_keys / total[:, None] * over_tau


@triton.jit
def _odds(key, kept, best, over_tau):
    """The likelihood of a candidate by the best one's."""
    behind = tl.sum(tl.where(kept > 0, key, 0.0), 1) - best
    return tl.exp(tl.maximum(behind * over_tau, MIN_EXPONENT))


@triton.jit
def candidate(element, c: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """1 for the elements that candidate c keeps, else 0."""
    return ((_bits(c, M, N) >> element) & 1).to(tl.float32)


@triton.constexpr_function
def count(m, n):
    """How many candidates there are."""
    return len(list(combinations(range(m), n)))


@triton.constexpr_function
def _bits(c, m, n):
    return sum(1 << i for i in list(combinations(range(m), n))[c])


@triton.jit
def offsets(groups, M: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Of a program's elements: where they lie, which of them there are, and their places in a group."""
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    element = tl.arange(0, WIDTH)[None, :]
    return (group * M)[:, None] + element, (group < groups)[:, None] & (element < M), element


@triton.jit
def temperatures(numbers):
    """1/λ and 1/τ."""
    over_lam = tl.load(numbers + 2).to(tl.float32, bitcast=True)
    return over_lam, tl.load(numbers + 3).to(tl.float32, bitcast=True)


@triton.jit
def _keys(logits, offset, inside, element, numbers, first, over_lam, M: tl.constexpr):
    index = (offset + first.to(tl.int64) * M).to(tl.uint32)
    key = tl.load(logits + offset, inside, 0.0) * over_lam + gumbel(index, numbers)
    return tl.where(element < M, key, BEHIND)


@triton.jit
def gumbel(index, numbers):
    """`noise.gumbel`."""
    x = index + tl.load(numbers).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * A
    x = ((x ^ (x >> 15)) + tl.load(numbers + 1).to(tl.uint32, bitcast=True)) * B
    x = (x ^ (x >> 16)) >> 9
    return -tl.log(-tl.log((x.to(tl.float32) + 0.5) * 1.1920928955078125e-7))


@triton.jit
def _all_keys(key, over_tau, push, element, M: tl.constexpr, N: tl.constexpr):
    """The keys of every pick."""
    keys = (key,)
    for _k in tl.static_range(N - 1):
        mu, _, leads, _, leader_log = _pick(key, over_tau, element, M)
        down = tl.where(leads, leader_log[:, None], tl.log(1.0 - tl.minimum(mu, 0.5)))
        key += tl.where(element < M, down, 0.0) * push
        keys = keys + (key,)
    return keys


@triton.jit
def _pick(key, over_tau, element, M: tl.constexpr):
    """μ, e without the leader, whether it leads, their sum T, the leader's log(1 - μ): see `eager`."""
    first = tl.max(key, 1)[:, None]
    ahead = key == first
    below = tl.max(tl.where(ahead, BEHIND, key), 1)[:, None]
    second = tl.where(tl.sum(ahead.to(tl.int32), 1)[:, None] > 1, first, below)
    e = tl.exp(tl.minimum(tl.maximum((key - second) * over_tau, MIN_EXPONENT), MAX_LEAD))
    e = tl.where(element < M, e, 0.0)
    leads = e > 1.0
    others = tl.where(leads, 0.0, e)
    scale = 1.0 / tl.sum(e, 1)
    rest = tl.maximum(tl.sum(others, 1), TINY)  # of no use where nobody leads
    beyond = tl.maximum((first - second) * over_tau - MAX_LEAD, 0.0)
    return e * scale[:, None], others, leads, rest, tl.log(rest * scale) - tl.sum(beyond, 1)


@triton.jit
def _soft_mask(keys, over_tau, element, M: tl.constexpr):
    mask = tl.zeros_like(keys[0])
    for k in tl.static_range(len(keys)):
        mu, _, _, _, _ = _pick(keys[k], over_tau, element, M)
        mask += mu
    return mask


@triton.jit
def _hard_mask(key, element, N: tl.constexpr, WIDTH: tl.constexpr):
    """The N largest; of equal ones the first."""
    mask = tl.zeros_like(key)
    for _ in tl.static_range(N):
        best = tl.max(key, 1)[:, None]
        place = tl.min(tl.where(key == best, element, WIDTH), 1)[:, None]
        mask += (element == place).to(tl.float32)
        key = tl.where(element == place, BEHIND, key)
    return mask
