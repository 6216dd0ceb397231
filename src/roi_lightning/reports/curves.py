"""Draw curves over optimizer steps, and the share of a mask that changed by layer."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from roi_lightning.masks.overlap import Overlap, kind_of, place_of
from roi_lightning.reports.style import line_style, own_style, style_axes

_WIDTH: Final = 5.0  # inches: nearly its own size on a phone
_MARKED: Final = 100  # so many points of a line have markers


def curves_figure(curves: Mapping[str, Sequence[tuple[int, float]]], y: str) -> Figure:
    """Draw values over optimizer steps.

    Args:
        curves: Steps and values by what the legend calls them.
        y: The name of the vertical axis.
    """
    with own_style():
        figure = Figure((_WIDTH, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for index, (label, curve) in enumerate(curves.items()):
            look = line_style(index, len(curve))
            if len(curve) > _MARKED:  # a loss of every step, which is noisy, stays in the background
                look |= {"marker": "", "linewidth": 0.6, "alpha": 0.5}
            axes.plot(*zip(*curve, strict=True), label=label, **look)
        style_axes(axes, "optimizer step", y)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.legend(frameon=False, fontsize=8)
    return figure


def changed_shares(overlap: Overlap) -> dict[str, dict[int, float]]:
    """Count the share of kept weights that the other mask does not keep, by kind of layer and by block.

    Args:
        overlap: Of two masks.
    """
    kept: dict[tuple[str, int], int] = {}
    both: dict[tuple[str, int], int] = {}
    for name, count in overlap.kept.items():
        key = kind_of(name), place_of(name)[1]
        kept[key] = kept.get(key, 0) + count
        both[key] = both.get(key, 0) + overlap.both[name]
    shares: dict[str, dict[int, float]] = {}
    for (kind, block), count in kept.items():
        shares.setdefault(kind, {})[block] = 1 - both[kind, block] / count
    return shares


def changed_figure(shares: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw a heat map of `changed_shares`: a row for each kind of layer, a column for each block."""
    blocks = sorted({block for by_block in shares.values() for block in by_block})
    cells = np.array([[by_block.get(block, np.nan) for block in blocks] for by_block in shares.values()])
    with own_style():
        figure = Figure((_WIDTH, 0.26 * len(shares) + 0.9), layout="constrained")
        axes = figure.add_subplot()
        mesh = axes.pcolormesh(np.ma.masked_invalid(cells), cmap="Blues", vmin=0, edgecolors="white", lw=0.3)
        style_axes(axes, "block", "")
        axes.set_yticks(np.arange(len(shares)) + 0.5, list(shares))
        shown = range(0, len(blocks), -(-len(blocks) // 10))
        axes.set_xticks([i + 0.5 for i in shown], [str(blocks[i]) for i in shown])
        axes.invert_yaxis()
        bar = figure.colorbar(mesh, format=PercentFormatter(1))
        bar.ax.tick_params(labelsize=7.5)
        bar.outline.set_visible(False)
    return figure
