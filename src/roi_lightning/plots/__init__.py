"""Figures of masks.

They are drawn without pyplot and without the user's matplotlib style.
"""

from roi_lightning.plots.corners import corner, mask_figure
from roi_lightning.plots.depth import by_place, layer_figure
from roi_lightning.plots.layers import find_layers
from roi_lightning.plots.layout import to_png

__all__ = [
    "by_place",
    "corner",
    "find_layers",
    "layer_figure",
    "mask_figure",
    "to_png",
]
