"""The samplers in one pass over memory each way, in Triton: the arithmetic of `soft_masks`, many groups at a time.

A tile is [groups, elements], elements padded to a power of two; of candidates there is a tuple of vectors [groups].
What changes from draw to draw is read from memory, so that nothing is compiled or captured anew.
"""

from itertools import combinations

import triton
import triton.language as tl

from roi_lightning.samplers.noise import MIX_A, MIX_B
from roi_lightning.samplers.soft_masks import MAX_LEAD as _MAX_LEAD
from roi_lightning.samplers.soft_masks import MIN_EXPONENT as _MIN_EXPONENT
from roi_lightning.samplers.soft_masks import NEVER as _NEVER

A = tl.constexpr(MIX_A & 0xFFFFFFFF)
B = tl.constexpr(MIX_B & 0xFFFFFFFF)
MAX_LEAD = tl.constexpr(_MAX_LEAD)
MIN_EXPONENT = tl.constexpr(_MIN_EXPONENT)
TINY = tl.constexpr(1.17549435e-38)
BEHIND = tl.constexpr(-3e38)
NEVER = tl.constexpr(_NEVER)
# The first group of a shard is any number: kernels of their own for multiples of 16 would be compiled.
jit = triton.jit(do_not_specialize=["first"])


@jit
def masked_weight(
    logits,
    weight,
    out,
    numbers,
    groups,
    first: tl.int64,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    SCALED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write weight * mask into `out`; the mask is a relaxed one, or the hard top-N of its keys."""
    group, offset, inside, element = _places(groups, M, WIDTH, TILE)
    key0, key1, over_lam, over_tau = _numbers(numbers)
    if KIND == "gumbel_top_k":
        key, flaw = _keys(logits, offset, first, inside, element, key0, key1, over_lam, M, N)
        if HARD:
            mask = _hard_mask(key, element, N, WIDTH)
        else:
            mask = _soft_mask(_all_keys(key, over_tau, SCALED, element, M, N), over_tau, element, M)
        mask += flaw
    elif KIND == "gumbel_subset":
        key, flaw = _keys(logits, offset, first, inside, element, key0, key1, over_lam, M, N)
        mask = _mixture(_shares(_sums(key, element, M, N), over_tau), element, M, N)
    else:
        scores = _candidate_keys(logits, group, groups, first, key0, key1, over_lam, M, N)
        mask = _mixture(_shares(scores, over_tau), element, M, N)
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
    first: tl.int64,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    SCALED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradient of the logits into `out`; that of a hard mask is the relaxed one's."""
    group, offset, inside, element = _places(groups, M, WIDTH, TILE)
    key0, key1, over_lam, over_tau = _numbers(numbers)
    value = tl.load(weight + offset, inside, 0.0).to(tl.float32)
    of_mask = tl.load(grad + offset, inside, 0.0).to(tl.float32) * value
    if KIND == "categorical":
        scores = _candidate_keys(logits, group, groups, first, key0, key1, over_lam, M, N)
        of_scores = _mixture_gradient(_shares(scores, over_tau), of_mask, element, M, N)
        place = out + group
        for c in tl.static_range(len(of_scores)):
            tl.store(place, of_scores[c] * over_tau * over_lam, group < groups)
            place += groups
    else:
        key, flaw = _keys(logits, offset, first, inside, element, key0, key1, over_lam, M, N)
        if KIND == "gumbel_subset":
            shares = _shares(_sums(key, element, M, N), over_tau)
            of_scores = _mixture_gradient(shares, of_mask, element, M, N)
            of_keys = _mixture(of_scores, element, M, N) * over_tau
        else:
            keys = _all_keys(key, over_tau, SCALED, element, M, N)
            of_keys = _picks_gradient(keys, of_mask, over_tau, SCALED, element, M, N) + flaw
        tl.store(out + offset, of_keys * over_lam, inside)


@triton.jit
def _places(groups, M: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Of a program: its groups, where their elements lie, which of them there are, their places in a group."""
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    element = tl.arange(0, WIDTH)[None, :]
    return group, (group * M)[:, None] + element, (group < groups)[:, None] & (element < M), element


@triton.jit
def _numbers(numbers):
    """A draw's key, 1/λ and 1/τ."""
    key0 = tl.load(numbers).to(tl.uint32, bitcast=True)
    key1 = tl.load(numbers + 1).to(tl.uint32, bitcast=True)
    over_lam = tl.load(numbers + 2).to(tl.float32, bitcast=True)
    over_tau = tl.load(numbers + 3).to(tl.float32, bitcast=True)
    return key0, key1, over_lam, over_tau


@triton.jit
def _keys(logits, offset, first, inside, element, key0, key1, over_lam, M: tl.constexpr, N: tl.constexpr):
    """Numbers, of -inf, too; and zero, or NaN where a logit is NaN or +inf, or too few others are left."""
    noise = _gumbel((first * M + offset).to(tl.uint32), key0, key1)
    key = tl.where(element < M, tl.load(logits + offset, inside, 0.0) * over_lam + noise, BEHIND)
    left = tl.sum((key > NEVER).to(tl.int32), 1)[:, None]
    key = tl.where((element < M) & (key <= NEVER), NEVER, key)
    return key, tl.where(left < N, float("nan"), tl.sum(key - key, 1)[:, None])


@triton.jit
def _candidate_keys(logits, group, groups, first, key0, key1, over_lam, M: tl.constexpr, N: tl.constexpr):
    keys, place = (), logits + group
    for c in tl.static_range(_count(M, N)):
        noise = _gumbel(((first + group) * _count(M, N) + c).to(tl.uint32), key0, key1)
        keys = keys + (tl.load(place, group < groups, 0.0) * over_lam + noise,)
        place += groups
    return keys


@triton.jit
def _sums(key, element, M: tl.constexpr, N: tl.constexpr):
    """Of the keys that each candidate keeps."""
    sums = ()
    for c in tl.static_range(_count(M, N)):
        sums = sums + (tl.sum(tl.where(_candidate(element, c, M, N) > 0, key, 0.0), 1),)
    return sums


@triton.jit
def _shares(scores, over_tau):
    """softmax(scores / τ); NaN in all of a group where one is NaN or +inf, or all are -inf."""
    best, total = scores[0], tl.zeros_like(scores[0])
    for c in tl.static_range(len(scores)):
        best = tl.maximum(best, scores[c])
        total += tl.where(scores[c] <= NEVER, 0.0, scores[c] - scores[c])
    total += tl.where(best <= NEVER, float("nan"), 0.0)
    odds, shares = (), ()
    for c in tl.static_range(len(scores)):
        e = tl.exp(tl.maximum((scores[c] - best) * over_tau, MIN_EXPONENT))
        odds = odds + (e,)
        total += e
    for c in tl.static_range(len(scores)):
        shares = shares + (odds[c] / total,)
    return shares


@triton.jit
def _mixture(shares, element, M: tl.constexpr, N: tl.constexpr):
    """Σ_c share_c · candidate_c."""
    mask = shares[0][:, None] * _candidate(element, 0, M, N)
    for c in tl.static_range(1, len(shares)):
        mask += shares[c][:, None] * _candidate(element, c, M, N)
    return mask


@triton.jit
def _mixture_gradient(shares, of_mask, element, M: tl.constexpr, N: tl.constexpr):
    """Of the scores over τ."""
    mean = tl.sum(of_mask * _mixture(shares, element, M, N), 1)  # of what the candidates' gradients are
    of_scores = ()
    for c in tl.static_range(len(shares)):
        ahead = tl.sum(of_mask * _candidate(element, c, M, N), 1) - mean
        of_scores = of_scores + (shares[c] * ahead,)
    return of_scores


@triton.jit
def _candidate(element, c: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """1 for the elements that candidate c keeps, else 0."""
    return ((_bits(c, M, N) >> element) & 1).to(tl.float32)


@triton.constexpr_function
def _count(m, n):
    """How many candidates there are."""
    return len(list(combinations(range(m), n)))


@triton.constexpr_function
def _bits(c, m, n):
    return sum(1 << i for i in list(combinations(range(m), n))[c])


@triton.jit
def _gumbel(index, key0, key1):
    """`noise.gumbel`."""
    x = index + key0
    x = (x ^ (x >> 16)) * A
    x = ((x ^ (x >> 15)) + key1) * B
    x = (x ^ (x >> 16)) >> 9
    return -tl.log(-tl.log((x.to(tl.float32) + 0.5) * 1.1920928955078125e-7))


@triton.jit
def _picks_gradient(keys, of_mask, over_tau, SCALED: tl.constexpr, element, M: tl.constexpr, N: tl.constexpr):
    push = over_tau if SCALED else 1.0
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
def _all_keys(key, over_tau, SCALED: tl.constexpr, element, M: tl.constexpr, N: tl.constexpr):
    """The keys of every pick."""
    push = over_tau if SCALED else 1.0
    keys = (key,)
    for _k in tl.static_range(N - 1):
        mu, _, leads, _, leader_log = _pick(key, over_tau, element, M)
        down = tl.where(leads, leader_log[:, None], tl.log(1.0 - tl.minimum(mu, 0.5)))
        key += tl.where(element < M, down, 0.0) * push
        keys = keys + (key,)
    return keys


@triton.jit
def _pick(key, over_tau, element, M: tl.constexpr):
    """μ, e without the leader, whether it leads, their sum T, the leader's log(1 - μ): see `soft_masks`."""
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
