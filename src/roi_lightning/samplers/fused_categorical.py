"""MaskLLM's sampler in one pass over memory each way, written for `torch.compile`.

The same arithmetic as in `categorical`, candidate by candidate: see `fused` for why, and for how weights lie as
[A, M, B]. Logits lie as [C, A, B], the candidates of a group C numbers apart in the noise's index.

Arguments of both kernels: `ints` is int32 [noise index of the first group's first candidate, key, key], `floats`
fp32 [1/λ, 1/τ, c], c the pull of `KeptNorm`.
"""

from itertools import combinations

import torch
from torch import Tensor

from roi_lightning.noise import gumbel_of
from roi_lightning.samplers.members import Members, mask_gradient, total, write_product
from roi_lightning.samplers.unrolled import LEAST


def masked_weight(
    logits: Tensor, weight: Tensor, out: Tensor, ints: Tensor, floats: Tensor, m: int, n: int
) -> None:
    """Write weight * soft mask into `out`.

    Args:
        logits: fp32 [C, A, B].
        weight: [A, M, B], any float dtype.
        out: Of the weight's shape and dtype.
        ints: See above.
        floats: See above.
        m: Members per group.
        n: Members a candidate keeps.
    """
    candidates = _candidates(m, n)
    e, share = _exponentials(logits, ints, floats, len(candidates))
    write_product(out, _mask(e, share, candidates, m), weight)


def logits_gradient(
    logits: Tensor,
    weight: Tensor,
    grad: Tensor,
    out: Tensor,
    ints: Tensor,
    floats: Tensor,
    m: int,
    n: int,
    kept_norm: bool,
) -> None:
    """Write the gradient of the logits into `out`.

    Args:
        logits: fp32 [C, A, B].
        weight: [A, M, B], any float dtype.
        grad: Of the masked weight.
        out: fp32 [C, A, B].
        ints: See above.
        floats: See above.
        m: Members per group.
        n: Members a candidate keeps.
        kept_norm: Whether there is a reward for kept norm.
    """
    candidates = _candidates(m, n)
    e, share = _exponentials(logits, ints, floats, len(candidates))
    mask = _mask(e, share, candidates, m) if kept_norm else None
    of_mask = mask_gradient(weight, grad, mask, floats[2])
    of_shares = [total([of_mask[i] for i in kept]) for kept in candidates]
    mean = total([x * h for x, h in zip(e, of_shares, strict=True)]) * share
    factor = share * floats[0] * floats[1]
    of_logits = [(h - mean) * x * factor for x, h in zip(e, of_shares, strict=True)]
    out.copy_(torch.stack(of_logits))


def _candidates(m: int, n: int) -> list[tuple[int, ...]]:
    # The tracer takes a number for a constant only once something has counted up to it.
    return list(combinations(range(m), len(list(range(n)))))


def _exponentials(logits: Tensor, ints: Tensor, floats: Tensor, count: int) -> tuple[Members, Tensor]:
    """Numbers in proportion to the candidates' shares, the largest of them 1, and one over their sum."""
    found, groups, columns = logits.shape
    assert found == count
    first = torch.arange(groups, dtype=torch.int32, device=logits.device).unsqueeze(1) * (count * columns)
    first = first + torch.arange(columns, dtype=torch.int32, device=logits.device) * count + ints[0]
    noise = [gumbel_of(first + c, ints[1], ints[2]) for c in range(count)]
    keys = [logits[c] * floats[0] + g for c, g in enumerate(noise)]
    best = keys[0]
    for key in keys[1:]:
        best = torch.maximum(best, key)
    e = [((key - best) * floats[1]).clamp(min=LEAST).exp() for key in keys]
    return e, 1.0 / total(e)


def _mask(e: Members, share: Tensor, candidates: list[tuple[int, ...]], m: int) -> Members:
    keep = [[x for x, kept in zip(e, candidates, strict=True) if i in kept] for i in range(m)]
    return [total(parts) * share for parts in keep]
