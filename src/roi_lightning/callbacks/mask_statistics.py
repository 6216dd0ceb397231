"""Numbers and pictures that tell how far a mask has settled."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from roi_lightning.masks import LayerMask
from roi_lightning.overlap import kind_of
from roi_lightning.shards import whole
from roi_lightning.sparse_linear import SparseLinear

# The difference of two Gumbel variables is logistic: beyond this lead, a redraw swaps two with under 1 %.
_SETTLED_LEAD: Final = 4.6
_TILE: Final = 8
_PIXELS: Final = 24


def logit_sample(layer: SparseLinear, count: int) -> Tensor:
    """The logits of evenly spread groups of a layer, [groups, choices], about `count` numbers."""
    state = layer.state
    groups = state.sampler.choices(whole(layer.logits.detach()), state.pattern, layer.dim)
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
    """Share of groups in which the last choice taken leads the first not taken by more than noise bridges.

    Args:
        logits: [groups, choices].
        picks: Choices taken.
        lam: Sampling temperature λ.

    Returns:
        A scalar in [0, 1].
    """
    ordered = (logits / lam).sort(-1, descending=True).values
    return (ordered[:, picks - 1] - ordered[:, picks] > _SETTLED_LEAD).float().mean()


def shown_layers(names: Sequence[str]) -> list[str]:
    """Layers of up to three kinds in the first, middle and last block: q_proj, k_proj, up_proj where present."""
    kinds = list(dict.fromkeys(kind_of(name) for name in names))
    wanted = [kind for kind in ("q_proj", "k_proj", "up_proj") if kind in kinds] or kinds[:3]
    chosen = []
    for kind in wanted:
        same = [name for name in names if kind_of(name) == kind]
        chosen += [same[i] for i in sorted({0, len(same) // 2, len(same) - 1})]
    return chosen


def mask_tile(mask: LayerMask) -> Tensor:
    """The top-left 8×8 corner of a mask as a picture, kept weights dark, grid lines between.

    Returns:
        uint8 [1, height, width].
    """
    bits = mask.to_bool()
    corner = (bits.T if mask.transposed else bits)[:_TILE, :_TILE]
    picture = torch.where(corner, 40, 225).to(torch.uint8)
    picture = picture.repeat_interleave(_PIXELS, 0).repeat_interleave(_PIXELS, 1)
    picture[::_PIXELS], picture[:, ::_PIXELS] = 150, 150
    return picture.unsqueeze(0)
