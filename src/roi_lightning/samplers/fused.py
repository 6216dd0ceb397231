"""RoI's sampler in one pass over memory each way, written for `torch.compile`.

The same arithmetic as in `unrolled`, member by member: a list holds one tensor per member of a group, so that
the compiler sees element-wise code and no reductions. Weights lie as [A, M, B] (A * B groups): B is 1 where
the inputs are a weight's last axis, A is the number of groups of inputs where they are its first.

Arguments of both kernels: `ints` is int32 [flat index of the first element, key, key], `floats` fp32
[1/λ, 1/τ, push, c], with `push` the factor on log(1 - μ) and c the pull of `KeptNorm`.
"""

from itertools import combinations

import torch
from torch import Tensor

from roi_lightning.noise import gumbel_of
from roi_lightning.samplers.members import Members, mask_gradient, total, write_product
from roi_lightning.samplers.unrolled import LEAST, MAX_LEAD

# μ, e without the leader, whether it leads, their sum T, the leader's log(1 - μ): see `unrolled`.
_Pick = tuple[Members, Members, Members, Tensor, Tensor]


def masked_weight(
    logits: Tensor, weight: Tensor, out: Tensor, ints: Tensor, floats: Tensor, m: int, n: int, hard: bool
) -> None:
    """Write weight * mask into `out`; the mask is the relaxed one, or the hard top-N of its keys.

    Args:
        logits: fp32 [A, M, B].
        weight: [A, M, B], any float dtype.
        out: Of the weight's shape and dtype.
        ints: See above.
        floats: See above.
        m: Members per group.
        n: Picks per group.
        hard: Whether the mask is the hard one.
    """
    keys = _keys(logits, ints, floats, m)
    mask = _hard_mask(keys, n) if hard else _sum([pick[0] for pick in _picks(keys, n, floats)])
    write_product(out, mask, weight)


def logits_gradient(
    logits: Tensor,
    weight: Tensor,
    grad: Tensor,
    out: Tensor,
    ints: Tensor,
    floats: Tensor,
    m: int,
    n: int,
    hard: bool,
    kept_norm: bool,
) -> None:
    """Write the gradient of the logits into `out`.

    Args:
        logits: fp32 [A, M, B].
        weight: [A, M, B], any float dtype.
        grad: Of the masked weight.
        out: fp32 [A, M, B].
        ints: See above.
        floats: See above.
        m: Members per group.
        n: Picks per group.
        hard: Whether the forward pass took the hard mask; concerns the kept norm only.
        kept_norm: Whether there is a reward for kept norm.
    """
    keys = _keys(logits, ints, floats, m)
    picks = _picks(keys, n, floats)
    mask = None
    if kept_norm:
        mask = _hard_mask(keys, n) if hard else _sum([pick[0] for pick in picks])
    of_keys = _keys_gradient(picks, mask_gradient(weight, grad, mask, floats[3]), floats)
    out.copy_(torch.stack([g * floats[0] for g in of_keys], 1))


def _keys(logits: Tensor, ints: Tensor, floats: Tensor, m: int) -> Members:
    groups, members, columns = logits.shape
    assert members == m
    first = torch.arange(groups, dtype=torch.int32, device=logits.device).unsqueeze(1) * (m * columns)
    first = first + torch.arange(columns, dtype=torch.int32, device=logits.device) + ints[0]
    noise = [gumbel_of(first + i * columns, ints[1], ints[2]) for i in range(m)]
    return [logits[:, i] * floats[0] + g for i, g in enumerate(noise)]


def _picks(keys: Members, n: int, floats: Tensor) -> list[_Pick]:
    picks = [_pick(keys, floats[1])]
    for _ in range(n - 1):
        mu, _, leads, _, leader_log = picks[-1]
        logs = [
            torch.where(a, leader_log, torch.log(1.0 - x.clamp(max=0.5)))
            for a, x in zip(leads, mu, strict=True)
        ]
        keys = [key + log * floats[2] for key, log in zip(keys, logs, strict=True)]
        picks.append(_pick(keys, floats[1]))
    return picks


def _pick(keys: Members, sharpness: Tensor) -> _Pick:
    first, second = torch.maximum(keys[0], keys[1]), torch.minimum(keys[0], keys[1])
    for key in keys[2:]:
        second = torch.maximum(second, torch.minimum(first, key))
        first = torch.maximum(first, key)
    e = [((key - second) * sharpness).clamp(LEAST, MAX_LEAD).exp() for key in keys]
    leads = [x > 1.0 for x in e]
    others = [torch.where(a, 0.0, x) for a, x in zip(leads, e, strict=True)]
    share, rest = 1.0 / total(e), total(others)
    beyond = ((first - second) * sharpness - MAX_LEAD).clamp(min=0.0)
    return [x * share for x in e], others, leads, rest, torch.log(rest * share) - beyond


def _keys_gradient(picks: list[_Pick], of_mask: Members, floats: Tensor) -> Members:
    of_keys = [g * floats[1] for g in _softmax_gradient(picks[-1][0], of_mask)]
    for mu, others, leads, rest, _ in reversed(picks[:-1]):
        pull = [torch.where(a, x, x / (1.0 - x)) * g for a, x, g in zip(leads, mu, of_keys, strict=True)]
        leader = total([torch.where(a, p, 0.0) for a, p in zip(leads, pull, strict=True)])
        others_pull = total([torch.where(a, 0.0, p) for a, p in zip(leads, pull, strict=True)])
        towards = leader / rest
        step = _softmax_gradient(mu, of_mask)
        of_keys = [
            g + (s + (o * towards + x * others_pull - p) * floats[2]) * floats[1]
            for g, s, o, x, p in zip(of_keys, step, others, mu, pull, strict=True)
        ]
    return of_keys


def _softmax_gradient(mu: Members, grad: Members) -> Members:
    mean = total([x * g for x, g in zip(mu, grad, strict=True)])
    return [(g - mean) * x for x, g in zip(mu, grad, strict=True)]


def _hard_mask(keys: Members, n: int) -> Members:
    better = [torch.zeros_like(key) for key in keys]
    for i, j in combinations(range(len(keys)), 2):
        ahead = (keys[j] > keys[i]).float()
        better[i] = better[i] + ahead
        better[j] = better[j] + (1.0 - ahead)
    return [(x < n).float() for x in better]


def _sum(lists: list[Members]) -> Members:
    return [total(list(same)) for same in zip(*lists, strict=True)]
