"""Divide columns into groups of M so that the N largest scores of every group keep as much as possible."""

from typing import Final

import torch
from torch import Tensor

from roi_lightning.masks.pattern import NMPattern

# Less than this share of the loss gained in a sweep, and it ends; the next would gain less still.
_WORTH: Final = 0.01
_ROUNDING: Final = 1e-6


def kept_score(scores: Tensor, pattern: NMPattern) -> float:
    """The sum of the scores that N:M keeps, taken in fp64.

    Args:
        scores: Not negative, [rows, columns].
        pattern: N of every M consecutive columns are kept in each row.
    """
    return float(scores.masked_fill(~pattern.top(scores), 0).sum(dtype=torch.float64))


def group_columns(scores: Tensor, pattern: NMPattern) -> Tensor:
    """An order of the columns with a larger kept score: columns are dealt out by size, then exchanged.

    In a round every group offers one column, drawn by a fixed seed. What each group would keep of every column on
    offer is known exactly, and so is the gain of every exchange; the best take place, no group in more than one.

    Args:
        scores: Not negative, fp32 [rows, columns], M dividing the columns.
        pattern: N:M.

    Returns:
        int64 [columns] on the CPU: what is to stand at each place. Never worse than the order as it is.
    """
    columns = scores.T.contiguous()
    groups = scores.sum(0).argsort(descending=True).cpu().view(pattern.m, -1).T.contiguous()
    generator = torch.Generator().manual_seed(0)
    total = float(scores.sum(dtype=torch.float64))
    kept = kept_score(scores[:, groups.flatten().to(scores.device)], pattern)
    while True:
        gained = sum(_exchange(columns, groups, pattern.n, generator) for _ in range(pattern.m**2))
        kept += gained
        if gained <= _WORTH * max(total - kept, _ROUNDING * total):
            break
    order = _tidy(groups)
    best = kept_score(scores[:, order.to(scores.device)], pattern)
    return order if best > kept_score(scores, pattern) else torch.arange(len(columns))


def _exchange(columns: Tensor, groups: Tensor, n: int, generator: torch.Generator) -> float:
    """One round.

    Args:
        columns: Scores, [columns, rows].
        groups: Members of each group, int64 [groups, m]; exchanged in place.
        n: Kept in each.
        generator: Of the choice of what is offered.

    Returns:
        The gain.
    """
    count, m = groups.shape
    slots = torch.randint(m, (count,), generator=generator)
    every = torch.arange(count)
    offered, others = groups[every, slots], groups[torch.arange(m) != slots[:, None]].view(count, m - 1)
    device = columns.device
    # Beside the others of its group, a column adds what it exceeds the n-th largest of them by.
    thresholds = columns[others.to(device)].topk(n, dim=1).values[:, -1]
    offers = columns[offered.to(device)]
    added = torch.stack([(offers - threshold).clamp_(min=0).sum(1) for threshold in thresholds])
    own = added.diagonal()
    gains = added - own[:, None]
    partners, gain = _pairs(gains + gains.T)  # rounded alike on both sides of the diagonal
    groups[every, slots] = offered[partners]
    return gain


def _pairs(gains: Tensor) -> tuple[Tensor, float]:
    """Pair groups by the largest gains, each at most once.

    Args:
        gains: Of every pair, symmetric [groups, groups]; changed.

    Returns:
        The partner of each group, itself if it has none, int64 [groups] on the CPU; the sum of the pairs' gains.
    """
    every = torch.arange(len(gains), device=gains.device)
    partners, total = every.clone(), 0.0
    gains.fill_diagonal_(0)
    while True:
        gain, best = gains.max(1)
        mutual = (best[best] == every) & (gain > 0)
        if not mutual.any():
            return partners.cpu(), total
        partners[mutual] = best[mutual]
        total += float(gain[mutual].sum(dtype=torch.float64)) / 2
        gains[mutual] = 0
        gains[:, mutual] = 0


def _tidy(groups: Tensor) -> Tensor:
    """The same groups, near to where their columns came from."""
    members = groups.sort(1).values
    return members[members[:, 0].argsort()].flatten()
