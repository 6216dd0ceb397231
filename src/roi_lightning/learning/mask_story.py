"""What a learned mask changed: beside the prior, the magnitude mask and Wanda's, in numbers and corners."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.overlap import RUN_DEPTHS, overlap_of, shown_layers
from roi_lightning.oneshot import Calibration, Wanda, prune_layers

Masks = Mapping[str, LayerMask]

_CORNER: Final = 8


def mask_story(learned: Masks, others: Mapping[str, Masks], reference: str) -> dict[str, Any]:
    """How a mask differs from one other cell by cell, and what it has in common with several.

    Args:
        learned: The mask by tensor.
        others: By name, masks of the same tensors.
        reference: The name of the one that the cells are compared with.

    Returns:
        Plain values: `changed` has by tensor the numbers of weights kept, and kept by the reference too; `overlap`
        the fraction of kept weights that each other mask keeps, of all layers and by kind; `corners` the first 8 × 8
        weights of some layers, before and after, as rows of `1` for kept and `0` for pruned.
    """
    overlaps = {name: overlap_of(learned, masks) for name, masks in others.items()}
    own, before = overlaps[reference], others[reference]
    return {
        "reference": reference,
        "changed": {name: {"kept": kept, "both": own.both[name]} for name, kept in own.kept.items()},
        "overlap": {name: {"all": one.all, "kinds": one.kinds} for name, one in overlaps.items()},
        "corners": [
            {"layer": name, "before": _corner(before[name]), "after": _corner(learned[name])}
            for name in shown_layers(list(learned), RUN_DEPTHS)
        ],
    }


def _corner(mask: LayerMask) -> list[str]:
    rows = mask.to_rows()[:_CORNER, :_CORNER]
    return ["".join("1" if kept else "0" for kept in row) for row in rows.tolist()]


def wanda_masks(module: MaskLearningModule, windows: Tensor) -> dict[str, LayerMask]:
    """Wanda's masks of the frozen weights, block after block, by layer name.

    Args:
        module: On a model that is not sharded.
        windows: Token ids, int64 [count, seq_len].

    Raises:
        UserError: If the model's layout or its activations do not allow it.
    """
    calibration = Calibration(windows, "sequential", module.device)
    with module.dense(), torch.no_grad():
        pruned = prune_layers(module.model, module.layers, Wanda(), module.pattern, calibration)
        return {name: module.layers[name].packed(result.mask) for name, result in pruned}
