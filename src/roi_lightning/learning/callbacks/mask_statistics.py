"""Statistics and pictures of how far a mask has settled."""

from typing import Final

import torch
from torch import Tensor

from roi_lightning.masks.layer_mask import LayerMask

# The difference of two Gumbel variables is logistic: beyond this lead, a redraw swaps two with under 1 %.
_SETTLED_LEAD: Final = 4.6
_TILE: Final = 8
_PIXELS: Final = 24


def sampled(groups: Tensor, count: int) -> Tensor:
    """Evenly spaced groups of a layer, [groups, choices], about `count` elements.

    Args:
        groups: All of them, [rows, ..., choices].
        count: How many elements.
    """
    rows = groups.shape[0]
    stride = max(1, groups.numel() // count)
    return groups[:: min(stride, rows)].flatten(0, -2)[: max(1, count // groups.shape[-1])]


def normalised_entropy(logits: Tensor, lam: float) -> Tensor:
    """Mean entropy of softmax(φ/λ) over groups, divided by the log of the number of choices.

    Args:
        logits: [groups, choices].
        lam: Sampling temperature λ.

    Returns:
        A scalar in [0, 1]; 1 where every choice is as likely as the others.
    """
    log_p = (logits / lam).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy.mean() / torch.tensor(float(logits.shape[-1]), device=logits.device).log()


def settled_groups(logits: Tensor, picks: int, lam: float) -> Tensor:
    """Fraction of groups in which the last choice taken leads the first not taken by more than noise bridges.

    Args:
        logits: [groups, choices].
        picks: Choices taken.
        lam: Sampling temperature λ.

    Returns:
        A scalar in [0, 1].
    """
    ordered = (logits / lam).sort(-1, descending=True).values
    return (ordered[:, picks - 1] - ordered[:, picks] > _SETTLED_LEAD).float().mean()


def mask_tile(mask: LayerMask) -> Tensor:
    """The top-left 8×8 corner of a mask as a picture, kept weights dark, grid lines between.

    Returns:
        uint8 [1, height, width].
    """
    corner = mask.to_rows()[:_TILE, :_TILE]
    picture = torch.where(corner, 40, 225).to(torch.uint8)
    picture = picture.repeat_interleave(_PIXELS, 0).repeat_interleave(_PIXELS, 1)
    picture[::_PIXELS], picture[:, ::_PIXELS] = 150, 150
    return picture.unsqueeze(0)
