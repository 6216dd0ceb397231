"""The top-left corner of a few layers, a row per layer and a column per mask."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from roi_lightning.figures.headline import Headline
from roi_lightning.figures.style import (
    ACCENT,
    DPI,
    FAINT,
    INK,
    KEPT,
    LINE,
    MARGIN,
    NARROWEST,
    PRUNED,
    own_style,
)
from roi_lightning.figures.text import elide, percent, rough_percent, text_width, wrap
from roi_lightning.masks import LayerMask, MaskSet

CORNER: Final = 8


def corner(mask: LayerMask, columns: int = CORNER) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
    """The top-left corner of a mask, kept = True.

    Args:
        mask: Of one layer.
        columns: How many inputs to show.

    Returns:
        [outputs, inputs], whatever the orientation of the tensor on disk: 8 outputs by `columns` inputs, or as
        many as there are.
    """
    shown = min(columns, mask.shape[1])
    packed = mask.packed[:CORNER, : -(-shown // 8)].numpy()
    return np.unpackbits(packed, axis=-1, count=shown, bitorder="little").astype(np.bool_)


def mask_figure(masks: Mapping[str, MaskSet], reference: str, layers: Sequence[str]) -> Figure:
    """Draw the corners of some layers, a row per layer and a column per mask.

    Every panel's title is the mask's name and its overlap with the reference over that whole layer.

    Args:
        masks: By the name to show; all of the same layers and pattern.
        reference: The name of the one that the others are measured against.
        layers: Names of tensors.
    """
    with own_style():
        return _Corners(dict(masks), reference, list(layers)).draw()


@dataclass
class _Corners:
    """The layout of the mask figure; lengths in inches, y from the top."""

    masks: dict[str, MaskSet]
    reference: str
    layers: list[str]

    gap = 0.24

    def __post_init__(self) -> None:
        self.pattern = self.masks[self.reference].pattern
        self.columns = max(CORNER, self.pattern.m)
        self.cell = min(0.172, 2.8 / self.columns)
        shapes = [self.masks[self.reference].layers[name].shape for name in self.layers]
        self.panel = self.cell * max(min(self.columns, shape[1]) for shape in shapes)
        self.step = max(self.panel, 1.1) + self.gap
        self.titles = [wrap(label, self.step - 0.08, 9, "bold", most=5) for label in self.masks]
        self.names = [_row_label(name) for name in self.layers]
        widths = [text_width(line, 9, "bold") for lines in self.names for line in lines]
        self.left = MARGIN + max(widths) + 0.42
        self.width = max(self.left + self.step * len(self.masks) - self.gap + MARGIN, NARROWEST)
        self.headline = Headline(
            f"{self.pattern} masks: top-left {CORNER} × {self.columns} weights", self._note(), self.width
        )
        self.title = LINE * (max(map(len, self.titles)) + 1) + 0.08

    def draw(self) -> Figure:
        rows = [min(CORNER, self.masks[self.reference].layers[name].shape[0]) for name in self.layers]
        tops = [self.headline.height + 0.2 + self.title]
        for count in rows[:-1]:
            tops.append(tops[-1] + self.cell * count + 0.22 + self.title)
        height = tops[-1] + self.cell * rows[-1] + 0.3 + MARGIN / 2
        figure = Figure(figsize=(self.width, height), dpi=DPI, facecolor="white")
        self.headline.draw(figure)
        for i, top in enumerate(tops):
            self._row(figure, i, top)
        return figure

    def _row(self, figure: Figure, row: int, top: float) -> None:
        width, height = figure.get_size_inches()
        name = self.layers[row]
        size = corner(self.masks[self.reference].layers[name], self.columns).shape
        w, h = size[1] * self.cell, size[0] * self.cell
        for column, label in enumerate(self.masks):
            x = self.left + column * self.step + (self.step - self.gap - w) / 2
            box = (x / width, 1 - (top + h) / height, w / width, h / height)
            axes = figure.add_axes(box, label=f"{row},{column}")
            self._panel(axes, label, "\n".join(self.titles[column]), name)
            if column == 0:
                axes.set_ylabel("output", size=7.5, color=FAINT, labelpad=3)
            if row == len(self.layers) - 1:
                axes.set_xlabel("input", size=7.5, color=FAINT, labelpad=3)
        middle = 1 - (top + h / 2) / height
        self._row_name(figure, self.names[row], middle, LINE / height)

    def _row_name(self, figure: Figure, lines: list[str], middle: float, line: float) -> None:
        x = MARGIN / self.width
        before: dict[str, Any] = {"ha": "left", "va": "center", "color": FAINT, "size": 8}
        last = before | {"color": INK, "size": 9, "weight": "bold"}
        for i, text in enumerate(lines):
            y = middle + line * ((len(lines) - 1) / 2 - i)
            figure.text(x, y, text, **(before if i + 1 < len(lines) else last))

    def _panel(self, axes: Axes, label: str, title: str, name: str) -> None:
        self._cells(axes, corner(self.masks[label].layers[name], self.columns))
        mine = label == self.reference
        axes.spines[:].set(color=ACCENT if mine else FAINT, linewidth=2.2 if mine else 0.6)
        last = "reference" if mine else percent(self._overlap(label, name))
        axes.set_title(
            f"{title}\n{last}",
            size=9,
            pad=4,
            linespacing=1.2,
            color=ACCENT if mine else INK,
            weight="bold" if mine else "normal",
        )

    def _cells(self, axes: Axes, shown: "np.ndarray[tuple[int, int], np.dtype[np.bool_]]") -> None:
        rows, columns = shown.shape
        axes.imshow(
            shown,
            cmap=ListedColormap([PRUNED, KEPT]),
            vmin=0,
            vmax=1,
            extent=(0, columns, rows, 0),
            interpolation="nearest",
            aspect="auto",
        )
        axes.set(xticks=[], yticks=[])
        axes.hlines(range(1, rows), 0, columns, colors="white", linewidth=0.5)
        axes.vlines(range(1, columns), 0, rows, colors="white", linewidth=0.5)
        axes.vlines(range(self.pattern.m, columns, self.pattern.m), 0, rows, colors="white", linewidth=2)

    def _overlap(self, label: str, name: str) -> float:
        other = self.masks[self.reference].layers[name]
        return self.masks[label].layers[name].kept_with(other) / other.kept

    def _note(self) -> str:
        n, m = self.pattern.n, self.pattern.m
        groups = f"Gaps part the groups of {m} inputs. " if m < self.columns else ""
        return (
            f"Dark: kept. Light: pruned. {groups}Percent: of the weights that the reference keeps in the whole "
            f"layer, those kept here too ({rough_percent(n / m)} by chance)."
        )


def _row_label(name: str) -> list[str]:
    """Lines that name a layer: the way to its block, then its place there, broken at dots."""
    match = re.fullmatch(r"(.*?\.\d+)\.(.+)", name.removesuffix(".weight"))
    before, place = match.groups() if match else ("", name.removesuffix(".weight"))
    return [*(wrap(before, 1.7, 8, most=3) if before else []), elide(place, 2.1, 9, "bold")]
