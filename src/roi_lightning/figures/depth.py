"""How far every mask agrees with a reference, block by block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from roi_lightning.figures.headline import Headline
from roi_lightning.figures.layers import place_of
from roi_lightning.figures.style import (
    DPI,
    FAINT,
    INK,
    LINE,
    MARGIN,
    NARROWEST,
    PRUNED,
    line_style,
    own_style,
)
from roi_lightning.figures.text import elide, rough_percent, text_width, wrap
from roi_lightning.masks import Overlap

_CHANCE: Final[dict[str, Any]] = {"color": FAINT, "linestyle": (0, (4, 3)), "linewidth": 1}


def layer_figure(overlaps: Mapping[str, Overlap], reference: str, chance: float) -> Figure:
    """Draw the overlap with the reference along the depth of the model, a panel per kind of layer.

    Args:
        overlaps: Of every other mask with the reference, by the mask's name.
        reference: The reference's name.
        chance: What two unrelated masks share, N/M; drawn as a dashed line.
    """
    with own_style():
        return _Depth(dict(overlaps), reference, chance).draw()


def by_place(overlap: Overlap) -> dict[str, dict[int, float]]:
    """Overlap by kind of layer and its place in a block, then by block.

    Layers that share a place (the experts of one block) are taken together. What all places begin with
    (`model.layers.`) is left out.

    Returns:
        `{"self_attn.q_proj": {0: 0.7, 1: 0.6, ...}, ...}`, each a share of the kept weights.
    """
    both: dict[tuple[str, int], int] = {}
    kept: dict[tuple[str, int], int] = {}
    for name, count in overlap.both.items():
        key = place_of(name)
        both[key] = both.get(key, 0) + count
        kept[key] = kept.get(key, 0) + overlap.kept[name]
    shared = _shared_prefix([place for place, _ in both])
    result: dict[str, dict[int, float]] = {}
    for place, block in sorted(both, key=lambda key: key[1]):
        result.setdefault(place[shared:], {})[block] = both[place, block] / kept[place, block]
    return result


def _shared_prefix(places: Sequence[str]) -> int:
    """The length of the dotted beginning that all places share, their last two parts aside."""
    heads = [place.split(".")[:-2] for place in places]
    shared = 0
    while all(len(head) > shared and head[shared] == heads[0][shared] for head in heads):
        shared += 1
    return len("".join(f"{part}." for part in heads[0][:shared]))


@dataclass
class _Depth:
    """The layout of the figure by block; lengths in inches, y from the top."""

    overlaps: dict[str, Overlap]
    reference: str
    chance: float

    panel = (2.3, 1.5)
    gap = (0.22, 0.62)

    def __post_init__(self) -> None:
        self.series = {label: by_place(overlap) for label, overlap in self.overlaps.items()}
        self.places = list(next(iter(self.series.values())))
        self.across = min(4, len(self.places))
        self.left = MARGIN + 0.55
        self.legend = [*(wrap(label, 2.2, 8.5, most=5) for label in self.series), ["by chance"]]
        legend = max(text_width(line, 8.5) for lines in self.legend for line in lines) + 0.5
        grid = self.across * (self.panel[0] + self.gap[0])
        self.width = max(self.left + grid + legend + MARGIN, NARROWEST)
        self.beside = self.left + grid + 0.05
        self.headline = Headline(f"Overlap with {self.reference} by block", self._note(), self.width)
        self.top = self.headline.height + 0.45

    def draw(self) -> Figure:
        down = -(-len(self.places) // self.across)
        rows = down * (self.panel[1] + self.gap[1])
        listed = 0.24 * len(self.legend) + LINE * sum(len(lines) - 1 for lines in self.legend)
        height = self.top + max(rows - 0.1, listed)
        figure = Figure(figsize=(self.width, height), dpi=DPI, facecolor="white")
        self.headline.draw(figure)
        for i, place in enumerate(self.places):
            self._panel(figure, i, place)
        self._legend(figure)
        return figure

    def _panel(self, figure: Figure, index: int, place: str) -> None:
        row, column = divmod(index, self.across)
        (w, h), height = self.panel, figure.get_size_inches()[1]
        x = self.left + column * (w + self.gap[0])
        y = self.top + row * (h + self.gap[1]) + h
        axes = figure.add_axes((x / self.width, 1 - y / height, w / self.width, h / height), label=place)
        axes.axhline(100 * self.chance, **_CHANCE)
        for i, series in enumerate(self.series.values()):
            blocks = series[place]
            axes.plot(list(blocks), [100 * value for value in blocks.values()], **line_style(i, len(blocks)))
        axes.set_title(elide(place, w, 9), size=9, color=INK, pad=5)
        self._dress(axes)
        axes.tick_params(labelleft=column == 0)
        if column == 0:
            axes.set_ylabel("overlap, %", size=8, color=FAINT)
        if index + self.across >= len(self.places):
            axes.set_xlabel("block", size=8, color=FAINT, labelpad=2)

    def _dress(self, axes: Axes) -> None:
        self._limit(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        axes.tick_params(labelsize=7.5, colors=FAINT, length=2.5, width=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color=FAINT, linewidth=0.6)
        axes.grid(axis="y", color=PRUNED, linewidth=0.7)
        axes.set_axisbelow(True)

    def _limit(self, axes: Axes) -> None:
        """The same limits for all panels."""
        lines = [line for series in self.series.values() for line in series.values()]
        values = [100 * x for line in lines for x in line.values()] + [100 * self.chance]
        low, high = min(values), max(values)
        room = max(0.06 * (high - low), 1.5)
        axes.set_ylim(low - room, high + room)
        blocks = [block for line in lines for block in line]
        axes.set_xlim(min(blocks) - 0.5, max(blocks) + 0.5)

    def _legend(self, figure: Figure) -> None:
        """A list by hand: matplotlib's own leaves out names that begin with an underscore."""
        height, y = figure.get_size_inches()[1], self.top + 0.1
        style: dict[str, Any] = {"size": 8.5, "color": INK, "ha": "left", "va": "baseline"}
        for i, lines in enumerate(self.legend):
            x = [(self.beside + shift) / self.width for shift in (0, 0.15, 0.3)]
            shown = line_style(i, 1) if i < len(self.series) else _CHANCE
            figure.add_artist(Line2D(x, [1 - y / height] * 3, markevery=[1], **shown))
            for line in lines:
                figure.text((self.beside + 0.4) / self.width, 1 - (y + 0.042) / height, line, **style)
                y += LINE
            y += 0.085

    def _note(self) -> str:
        return (
            "Of the weights that the reference keeps, those that another mask keeps too. "
            f"Dashed: what chance gives, {rough_percent(self.chance)}."
        )
