"""Perplexity as a plain loop computes it."""

import math

import torch


@torch.no_grad()
def by_a_loop(lm, windows):
    """exp of the mean loss of all predicted tokens, window by window."""
    total, count = 0.0, 0
    for window in windows:
        loss = lm(input_ids=window[None], labels=window[None]).loss
        total, count = total + float(loss) * (len(window) - 1), count + len(window) - 1
    return math.exp(total / count)
