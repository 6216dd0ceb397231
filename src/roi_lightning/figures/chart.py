"""One panel of lines over numbers that double: rows, batch sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from roi_lightning.figures.headline import Headline
from roi_lightning.figures.style import DPI, FAINT, MARGIN, PRUNED, line_style, own_style
from roi_lightning.figures.text import text_width

_PANEL: Final = (4.6, 2.9)
_LEFT, _BELOW, _LABEL_SIZE = 0.65, 0.55, 8.5


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        label: Its name in the list at the side.
        points: x → y, both above 0.
        style: Its colour and marker, by number; lines that belong together share it.
        kind: `measured`, or `bound` for a thin dashed line without markers.
    """

    label: str
    points: Mapping[int, float]
    style: int
    kind: Literal["measured", "bound"] = "measured"


@dataclass(frozen=True)
class Chart:
    """What is drawn, besides the lines.

    Attributes:
        title: Across the top.
        note: Below the title.
        x: What lies along the bottom.
        y: What lies along the side.
        scale: Of y; a linear one begins at 0.
        level: A y to mark with a faint line, if any.
    """

    title: str
    note: str
    x: str
    y: str
    scale: Literal["linear", "log"]
    level: float | None = None

    def draw(self, lines: Sequence[Line]) -> Figure:
        """Draw the lines; x is logarithmic."""
        with own_style():
            side = max(text_width(line.label, _LABEL_SIZE) for line in lines) + 0.6
            width = MARGIN + _LEFT + _PANEL[0] + side + MARGIN
            headline = Headline(self.title, self.note, width)
            top = headline.height + 0.2
            height = top + _PANEL[1] + _BELOW
            figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
            headline.draw(figure)
            left, bottom = (MARGIN + _LEFT) / width, _BELOW / height
            axes = figure.add_axes((left, bottom, _PANEL[0] / width, _PANEL[1] / height))
            self._plot(axes, lines)
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, fontsize=_LABEL_SIZE)
        return figure

    def _plot(self, axes: Axes, lines: Sequence[Line]) -> None:
        axes.set_xscale("log", base=2)
        if self.level is not None:
            axes.axhline(self.level, color=FAINT, linewidth=0.8)
        for line in lines:
            axes.plot(list(line.points), list(line.points.values()), label=line.label, **_look(line))
        axes.set_xlabel(self.x, size=8, color=FAINT)
        axes.set_ylabel(self.y, size=8, color=FAINT)
        _dress(axes, sorted({x for line in lines for x in line.points}))
        if self.scale == "log":
            _dress_log(axes)
        else:
            axes.set_ylim(bottom=0)


def _look(line: Line) -> dict[str, Any]:
    style = line_style(line.style, len(line.points))
    if line.kind == "measured":
        return style
    return style | {"marker": "", "linewidth": 0.8, "linestyle": (0, (4, 3))}


def _dress(axes: Axes, xs: Sequence[int]) -> None:
    axes.set_xticks(xs, [f"{x}" for x in xs])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=7.5, colors=FAINT, length=2.5, width=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=FAINT, linewidth=0.6)
    axes.grid(axis="y", color=PRUNED, linewidth=0.7)
    axes.set_axisbelow(True)


def _dress_log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
