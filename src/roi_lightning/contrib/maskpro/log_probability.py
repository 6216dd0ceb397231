"""The log-probability of a mask drawn without replacement, differentiated: what a policy gradient needs.

N of a group's M elements are drawn one after another, each with a probability proportional to exp(logit) among those
that are left. The N largest of logits + Gumbel noise are such a draw, the largest first, which is how the hard
Gumbel-Top-K at λ = 1 makes it; here the same noise says in which order.
"""

from dataclasses import replace

import torch
from torch import Tensor

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Draw
from roi_lightning.samplers.relaxation import chunk_size


def log_probability_gradient(logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
    """The gradient of log p, p the probability of the ordered draw, with respect to the logits.

    Every pick adds 1 where it fell, and takes from those that were left before it their probabilities.

    Args:
        logits: fp32 [..., out, in].
        pattern: The N:M pattern.
        draw: Whose noise says in which order.

    Returns:
        fp32 of the same shape, summing to 0 in every group.
    """
    out = torch.empty_like(logits)
    groups, drawn = logits.view(-1, pattern.m), out.view(-1, pattern.m)
    step = chunk_size(logits) // pattern.m
    for first in range(0, len(groups), step):
        part = groups[first : first + step]
        noise = replace(draw, first=draw.first + first).noise_like(part, pattern)
        # Elements along the first axis: reductions over a short last one cost an order of magnitude more.
        own = part.T.clone(memory_format=torch.contiguous_format)
        drawn[first : first + step] = _of_groups(own, noise.T, pattern.n).T
    return out


def _of_groups(logits: Tensor, noise: Tensor, picks: int) -> Tensor:
    """Of some groups, [M, E]; the logits are overwritten."""
    keys = logits + noise
    gradient = torch.zeros_like(logits)
    for _ in range(picks):
        gradient.sub_(logits.softmax(0))
        pick = keys.max(0, keepdim=True).indices
        gradient.scatter_add_(0, pick, torch.ones_like(gradient[:1]))
        logits.scatter_(0, pick, -torch.inf)
        keys.scatter_(0, pick, -torch.inf)
    return gradient
