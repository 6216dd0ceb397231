"""Pictures of how the masks of one model differ.

One shows the top-left corner of a few layers, a column per method; the other how far every mask agrees with a
reference, block by block. Both are drawn without pyplot and whatever style the user has configured, and all
sizes come from measured text, so that long names neither overlap nor run off the page.
"""

from roi_lightning.figures.corners import CORNER, corner, mask_figure
from roi_lightning.figures.depth import by_place, layer_figure
from roi_lightning.figures.layers import MOST_LAYERS, find_layers, place_of, shown_layers
from roi_lightning.figures.style import to_png

__all__ = [
    "CORNER",
    "MOST_LAYERS",
    "by_place",
    "corner",
    "find_layers",
    "layer_figure",
    "mask_figure",
    "place_of",
    "shown_layers",
    "to_png",
]
