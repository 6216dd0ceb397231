"""The picture of a study: held-out perplexity of the hardened mask against tokens seen, a panel per pattern."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from benchmarks.study.cells import Cell
from roi_lightning.reports.style import (
    FAINT,
    INK,
    NAME,
    line_style,
    own_style,
    style_axes,
    titled_figure,
    to_png,
)
from roi_lightning.utils.atomic_io import written_aside

_NOTE: Final = (
    "Perplexity of the hardened mask on held-out windows, by tokens learned from. Lines: the mean over seeds; "
    "bands: their range. Dashed: the dense model and the prior mask that methods start from, on the same windows."
)
_DASHED: Final[dict[str, Any]] = {"color": FAINT, "linestyle": (0, (4, 3)), "linewidth": 1}
Curve = list[tuple[int, list[float]]]


def draw_study(
    cells: Sequence[Cell],
    results: Mapping[str, Mapping[str, Any]],
    references: Mapping[str, Mapping[str, Any]],
    title: str,
    out: Path,
) -> None:
    """Write the PNG; see `table.make_rows` for the arguments."""
    with own_style():
        figure = _figure(cells, results, references, title)
    with written_aside(out) as partial:
        partial.write_bytes(to_png(figure))


def curves(
    cells: Sequence[Cell], results: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str, int], Curve]:
    """By pattern, method and length of the run: tokens seen, and the finite perplexities of its seeds there."""
    found: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for cell in cells:
        for tokens, value in results.get(cell.name, {}).get("curve", []):
            if math.isfinite(value):
                key = (cell.pattern, cell.method.name, cell.tokens)
                found.setdefault(key, {}).setdefault(tokens, []).append(value)
    return {key: sorted(points.items()) for key, points in found.items()}


def _figure(
    cells: Sequence[Cell],
    results: Mapping[str, Mapping[str, Any]],
    references: Mapping[str, Mapping[str, Any]],
    title: str,
) -> Figure:
    patterns = list(dict.fromkeys(cell.pattern for cell in cells))
    drawn = curves(cells, results)
    methods = list(dict.fromkeys(method for _, method, _ in drawn))
    figure = titled_figure(title, _NOTE, 4.2 * len(patterns) + 1.8, 3.4)
    for pattern, axes in zip(patterns, figure.subplots(1, len(patterns), squeeze=False)[0], strict=True):
        here = {key[1:]: curve for key, curve in drawn.items() if key[0] == pattern}
        for (method, _), curve in here.items():
            _line(axes, curve, methods.index(method))
        _dress(axes, pattern)
        ends = [max(curve[-1][1]) for curve in here.values()]
        measured = {"dense": references.get("dense", {}), "prior": references.get(pattern, {})}
        mark_references(axes, measured, ends)
    handles = [Line2D([], [], **line_style(i, 1)) for i in range(len(methods))]
    figure.legend(handles, methods, loc="outside right center", frameon=False, prop=NAME, labelcolor=INK)
    return figure


def _line(axes: Axes, curve: Curve, index: int) -> None:
    tokens = [x for x, _ in curve]
    low, high = [min(values) for _, values in curve], [max(values) for _, values in curve]
    style = line_style(index, len(curve))
    axes.plot(tokens, [sum(values) / len(values) for _, values in curve], **style)
    if low != high:
        axes.fill_between(tokens, low, high, color=style["color"], alpha=0.18, linewidth=0)


def mark_references(axes: Axes, measured: Mapping[str, Mapping[str, Any]], ends: Sequence[float]) -> None:
    """Draw dashed lines at the held-out perplexities, labelled on the side where no curve ends."""
    values = {name: entry.get("held_out", math.inf) for name, entry in measured.items()}
    values = {name: value for name, value in values.items() if math.isfinite(value)}
    for value in values.values():
        axes.axhline(value, zorder=1, **_DASHED)
    low, high = axes.get_ylim()
    right, label_height = axes.get_xlim()[1], (high / low) ** 0.08
    for name, value in values.items():
        above = not any(value <= end < value * label_height for end in ends)
        axes.annotate(
            f"{name} {_perplexity(value)}",
            (right, value),
            (-2, 2.5 if above else -2.5),
            textcoords="offset points",
            size=7.5,
            color=FAINT,
            ha="right",
            va="bottom" if above else "top",
        )


def _perplexity(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _dress(axes: Axes, pattern: str) -> None:
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_title(pattern, size=10, color=INK, pad=6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(FuncFormatter(tokens_label))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_perplexity))
    axes.yaxis.set_minor_formatter(NullFormatter())
    style_axes(axes, "tokens seen", "held-out perplexity")


def tokens_label(x: float, _: object = None) -> str:
    """A number of tokens on an axis."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:,.4g} {unit}"
    return f"{x:,.4g}"
