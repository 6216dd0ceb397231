"""Draw a piece of a few layers, a row per layer and a column per mask."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.masks.layer_mask import LayerMask, unpack_bits
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.reports.style import (
    ACCENT,
    FAINT,
    INK,
    KEPT,
    NAME,
    PRUNED,
    own_style,
    percent,
    titled_figure,
    wrap,
)

CORNER: Final = 8


def piece(mask: LayerMask, columns: int = CORNER, row: int = 0, column: int = 0) -> Tensor:
    """Unpack 8 rows of `columns` weights from a place on, or as many as there are, boolean [outputs, inputs]."""
    return unpack_bits(mask.packed[row : row + CORNER], min(column + columns, mask.shape[1]))[:, column:]


def most_changed(one: LayerMask, other: LayerMask, columns: int) -> tuple[int, int]:
    """Find the first row and column of the piece in which two masks differ most."""
    differ = (one.to_rows() != other.to_rows())[None].float()
    counts = F.avg_pool2d(differ, (CORNER, columns), ceil_mode=True, divisor_override=1)[0]
    row, column = divmod(int(counts.argmax()), counts.shape[1])
    return row * CORNER, column * columns


def mask_figure(
    masks: Mapping[str, MaskSet], reference: str, layers: Sequence[str], changed: bool = False
) -> Figure:
    """Draw a piece of some layers, a row per layer and a column per mask.

    Every panel's title is the mask's name and its overlap with the reference over that whole layer.

    Args:
        masks: By the name to show; all of the same layers and pattern.
        reference: The name of the one that the others are measured against.
        layers: Names of tensors.
        changed: Instead of top-left corners, show where the last mask differs most from the reference, with dots.
    """
    patterns = {name: masks[reference].pattern.of(name) for name in layers}
    columns = max(CORNER, *(pattern.m for pattern in patterns.values()))
    panel = min(max(1.4, 0.17 * columns), 2.8)
    titles = [wrap(label, int(13 * panel), 4) for label in masks]
    lines = max(title.count("\n") for title in titles) + 2
    width = max(1.9 + (panel + 0.25) * len(masks), 5.2)
    height = len(layers) * (panel * CORNER / columns + 0.15 * lines + 0.25)
    with own_style():
        where = "most changed" if changed else "top-left"
        title = f"{masks[reference].pattern} masks: {where} {CORNER} × {columns} weights"
        figure = titled_figure(title, _note(list(patterns.values()), columns), width, height)
        panels = figure.subplots(len(layers), len(masks), squeeze=False)
        for row, name in enumerate(layers):
            own, last = (masks[label].layers[name] for label in (reference, list(masks)[-1]))
            at = most_changed(own, last, columns) if changed else (0, 0)
            place = ("row {}, column {}\n".format(*at) if changed else "") + _layer_label(name)
            panels[row, 0].set_ylabel(place, labelpad=8, rotation=0, ha="right", va="center", **NAME)
            for column, label in enumerate(masks):
                axes, mask = panels[row, column], masks[label].layers[name]
                axes.set_label(f"{row},{column}")
                _draw_cells(axes, piece(mask, columns, *at), patterns[name])
                if changed:
                    y, x = (piece(mask, columns, *at) != piece(own, columns, *at)).nonzero(as_tuple=True)
                    axes.scatter(x + 0.5, y + 0.5, s=9, color=ACCENT)
                first = label == reference
                overlap = "reference" if first else f"{100 * (mask.kept_with(own) / own.kept):.1f} %"
                colour = ACCENT if first else INK
                axes.set_title(f"{titles[column]}\n{overlap}", pad=4, color=colour, **NAME)
                axes.spines[:].set(color=ACCENT if first else FAINT, linewidth=2.2 if first else 0.6)
    return figure


def _draw_cells(axes: Axes, shown: Tensor, pattern: NMPattern) -> None:
    rows, columns = shown.shape
    axes.imshow(
        shown.numpy(),
        cmap=ListedColormap([PRUNED, KEPT]),
        vmin=0,
        vmax=1,
        extent=(0, columns, rows, 0),
        interpolation="nearest",
    )
    axes.set(xticks=[], yticks=[])
    axes.hlines(range(1, rows), 0, columns, colors="white", linewidth=0.5)
    axes.vlines(range(1, columns), 0, rows, colors="white", linewidth=0.5)
    axes.vlines(range(pattern.m, columns, pattern.m), 0, rows, colors="white", linewidth=2)


def _note(patterns: Sequence[NMPattern], columns: int) -> str:
    sizes = sorted({pattern.m for pattern in patterns if pattern.m < columns})
    groups = f"Gaps part the groups of {' or '.join(map(str, sizes))} inputs. " if sizes else ""
    chances = dict.fromkeys(percent(pattern.n / pattern.m) for pattern in patterns)
    return (
        f"Rows: outputs; columns: inputs. Strong: kept; faint: pruned. {groups}Percent: of the weights that the "
        f"reference keeps in the whole layer, those kept here too ({' or '.join(chances)} by chance)."
    )


def _layer_label(name: str) -> str:
    """The path to a layer's block, and below it the layer's place there."""
    match = re.fullmatch(r"(.*?\.\d+)\.(.+)", name.removesuffix(".weight"))
    parts = match.groups() if match else [name.removesuffix(".weight")]
    return "\n".join(wrap(part, 22, 3) for part in parts)
