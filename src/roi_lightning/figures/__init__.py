"""Pictures of how the masks of one model differ, and of how fast 2:4 models run.

They are drawn without pyplot and without the user's matplotlib style.
"""

from roi_lightning.figures.corners import corner, mask_figure
from roi_lightning.figures.depth import by_place, layer_figure
from roi_lightning.figures.layers import find_layers
from roi_lightning.figures.layout import to_png

__all__ = [
    "by_place",
    "corner",
    "find_layers",
    "layer_figure",
    "mask_figure",
    "to_png",
]
