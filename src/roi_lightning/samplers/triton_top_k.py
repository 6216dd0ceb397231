"""RoI's sampler in one pass over memory each way, in Triton: the arithmetic of `unrolled`, many groups at a time.

Member m of group g lies at (g // columns) * M * columns + g % columns + m * columns: columns is 1 where the inputs
are the weight's last axis, and the number of outputs where they are its first. A tile is [groups, members], members
padded to a power of two.
"""

import triton
import triton.language as tl

from roi_lightning.noise import MIX_A, MIX_B
from roi_lightning.samplers.unrolled import LEAST as _LEAST
from roi_lightning.samplers.unrolled import MAX_LEAD as _MAX_LEAD

A = tl.constexpr(MIX_A & 0xFFFFFFFF)
B = tl.constexpr(MIX_B & 0xFFFFFFFF)
LEAST = tl.constexpr(_LEAST)
MAX_LEAD = tl.constexpr(_MAX_LEAD)
TINY = tl.constexpr(1.17549435e-38)
BEHIND = tl.constexpr(-3e38)


@triton.jit
def masked_weight(
    logits,
    weight,
    out,
    groups,
    columns,
    key0,
    key1,
    over_lam,
    over_tau,
    push,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    HARD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write weight * mask into `out`; the mask is the relaxed one, or the hard top-N of its keys."""
    at, here, member = _places(groups, columns, M, WIDTH, TILE)
    key = _keys(logits, at, here, member, key0, key1, over_lam, M)
    if HARD:
        mask = _hard_mask(key, member, N, WIDTH)
    else:
        mask = _soft_mask(_all_keys(key, over_tau, push, member, M, N), over_tau, member, M)
    mask += tl.where(member < M, key - key, 0.0)  # logits that are no numbers must not go unnoticed
    value = tl.load(weight + at, here, 0.0)
    tl.store(out + at, (value.to(tl.float32) * mask).to(value.dtype, fp_downcast_rounding="rtne"), here)


@triton.jit
def logits_gradient(
    logits,
    weight,
    grad,
    out,
    pull,
    groups,
    columns,
    key0,
    key1,
    over_lam,
    over_tau,
    push,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    HARD: tl.constexpr,
    KEPT_NORM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradient of the logits into `out`."""
    at, here, member = _places(groups, columns, M, WIDTH, TILE)
    keys = _all_keys(_keys(logits, at, here, member, key0, key1, over_lam, M), over_tau, push, member, M, N)
    value = tl.load(weight + at, here, 0.0).to(tl.float32)
    of_mask = tl.load(grad + at, here, 0.0).to(tl.float32) * value
    if KEPT_NORM:
        mask = _hard_mask(keys[0], member, N, WIDTH) if HARD else _soft_mask(keys, over_tau, member, M)
        of_mask -= tl.load(pull) * mask * value * value
    total = tl.zeros_like(of_mask)
    for k in tl.static_range(N - 1, -1, -1):
        mu, others, leads, rest, _ = _pick(keys[k], over_tau, member, M)
        step = (of_mask - tl.sum(mu * of_mask, 1)[:, None]) * mu
        if k < N - 1:
            # μ/(1 - μ) of the others; for the leader, whose odds may overflow, μ.
            through = tl.where(leads, mu, mu / (1.0 - tl.minimum(mu, 0.75))) * total
            leader = tl.sum(tl.where(leads, through, 0.0), 1) / rest
            rest_through = tl.sum(tl.where(leads, 0.0, through), 1)
            step += (others * leader[:, None] + mu * rest_through[:, None] - through) * push
        total += step * over_tau
    tl.store(out + at, total * over_lam, here)


@triton.jit
def _places(groups, columns, M: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    member = tl.arange(0, WIDTH)[None, :]
    first = (group // columns) * M * columns + group % columns
    return first[:, None] + member * columns, (group < groups)[:, None] & (member < M), member


@triton.jit
def _keys(logits, at, here, member, key0, key1, over_lam, M: tl.constexpr):
    key = tl.load(logits + at, here, 0.0) * over_lam + _gumbel(at.to(tl.uint32), key0, key1)
    return tl.where(member < M, key, BEHIND)


@triton.jit
def _gumbel(index, key0, key1):
    x = index + key0.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * A
    x = ((x ^ (x >> 15)) + key1.to(tl.uint32, bitcast=True)) * B
    x = (x ^ (x >> 16)) >> 9
    return -tl.log(-tl.log((x.to(tl.float32) + 0.5) * 1.1920928955078125e-7))


@triton.jit
def _all_keys(key, over_tau, push, member, M: tl.constexpr, N: tl.constexpr):
    """The keys of every pick."""
    keys = (key,)
    for _k in tl.static_range(N - 1):
        mu, _, leads, _, leader_log = _pick(key, over_tau, member, M)
        down = tl.where(leads, leader_log[:, None], tl.log(1.0 - tl.minimum(mu, 0.5)))
        key += tl.where(member < M, down, 0.0) * push
        keys = keys + (key,)
    return keys


@triton.jit
def _pick(key, over_tau, member, M: tl.constexpr):
    """μ, e without the leader, whether it leads, their sum T, the leader's log(1 - μ): see `unrolled`."""
    first = tl.max(key, 1)[:, None]
    ahead = key == first
    below = tl.max(tl.where(ahead, BEHIND, key), 1)[:, None]
    second = tl.where(tl.sum(ahead.to(tl.int32), 1)[:, None] > 1, first, below)
    e = tl.exp(tl.minimum(tl.maximum((key - second) * over_tau, LEAST), MAX_LEAD))
    e = tl.where(member < M, e, 0.0)
    leads = e > 1.0
    others = tl.where(leads, 0.0, e)
    share = 1.0 / tl.sum(e, 1)
    rest = tl.maximum(tl.sum(others, 1), TINY)  # of no use where nobody leads
    beyond = tl.maximum((first - second) * over_tau - MAX_LEAD, 0.0)
    return e * share[:, None], others, leads, rest, tl.log(rest * share) - tl.sum(beyond, 1)


@triton.jit
def _soft_mask(keys, over_tau, member, M: tl.constexpr):
    mask = tl.zeros_like(keys[0])
    for k in tl.static_range(len(keys)):
        mu, _, _, _, _ = _pick(keys[k], over_tau, member, M)
        mask += mu
    return mask


@triton.jit
def _hard_mask(key, member, N: tl.constexpr, WIDTH: tl.constexpr):
    """The N largest; of equal ones the first."""
    mask = tl.zeros_like(key)
    for _ in tl.static_range(N):
        best = tl.max(key, 1)[:, None]
        place = tl.min(tl.where(key == best, member, WIDTH), 1)[:, None]
        mask += (member == place).to(tl.float32)
        key = tl.where(member == place, BEHIND, key)
    return mask
