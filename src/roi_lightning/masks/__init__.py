"""An N:M mask: its pattern, one layer's mask, a model's mask set and its file, overlap between masks."""

from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern

__all__ = ["LayerMask", "MaskSet", "NMPattern"]
