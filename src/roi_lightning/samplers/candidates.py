"""The softmax over all candidate masks of a group, and its gradient, on plain tensors.

C = C(M, N) candidates; they, or the members, lie along the first axis: see `unrolled` for why.
"""

from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from roi_lightning.pattern import NMPattern
from roi_lightning.samplers.unrolled import LEAST


def shares(keys: Tensor, tau: float) -> Tensor:
    """Each candidate's share, softmax(keys / τ) over the candidates.

    Args:
        keys: κ φ + g, [C, ...], fp32 or fp64; overwritten.
        tau: Softmax temperature τ.
    """
    # In fp32, candidates further behind would only be slow: see `unrolled`.
    least = LEAST if keys.dtype == torch.float32 else -torch.inf
    keys.sub_(keys.amax(0)).div_(tau).clamp_(min=least).exp_()
    return keys.div_(keys.sum(0))


def soft_mask(share: Tensor, pattern: NMPattern) -> Tensor:
    """Σ_c p_c · candidate_c.

    Args:
        share: From `shares`, [C, ...].
        pattern: The N:M pattern.

    Returns:
        [M, ...], summing to N along the first axis.
    """
    holders = holders_of(pattern, share.device)
    return torch.stack([share.index_select(0, those).sum(0) for those in holders])


def soft_mask_gradient(share: Tensor, grad: Tensor, tau: float, pattern: NMPattern) -> Tensor:
    """The gradient of <mask, grad> with respect to the keys.

    Args:
        share: From `shares`, [C, ...].
        grad: Of the mask, [M, ...].
        tau: Softmax temperature τ.
        pattern: The N:M pattern.

    Returns:
        [C, ...].
    """
    kept = members_of(pattern, share.device)
    of_share = grad.index_select(0, kept[:, 0])
    for members in kept.T[1:]:
        of_share += grad.index_select(0, members)
    return of_share.sub_((share * of_share).sum(0)).mul_(share).div_(tau)


@cache
def members_of(pattern: NMPattern, device: torch.device) -> Tensor:
    """The members each candidate keeps, int64 [C, N], candidates in lexicographic order."""
    return torch.tensor(list(combinations(range(pattern.m), pattern.n)), device=device)


@cache
def holders_of(pattern: NMPattern, device: torch.device) -> Tensor:
    """The candidates that keep each member, int64 [M, C * N / M]."""
    members = members_of(pattern, device)
    return torch.stack([(members == i).any(1).nonzero().squeeze(1) for i in range(pattern.m)])
