"""How fast 2:4 models run, from the rows of `benchmark linear` and `benchmark decode`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from roi_lightning.plots.layout import FAINT, line_style, own_style, style_axes, titled_figure

_Row = Mapping[str, Any]


def speedup_figure(rows: Sequence[_Row], machine: str) -> Figure:
    """Draw how much faster packed weights are than dense ones, by rows of activations.

    Args:
        rows: Of `linear.packed_over_dense`.
        machine: Named below the chart.
    """
    note = (
        f"Above 1: packed is faster. Dashed: the limit where reading the bytes takes all the time. {machine}."
    )
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    with own_style():
        figure = titled_figure(f"Linear layers, 2:4 packed against dense, {rows[0]['dtype']}", note, 7, 3.4)
        axes = figure.add_subplot()
        for i, shape in enumerate(shapes):
            _plot(axes, shape, {row["rows"]: row["ratio"] for row in rows if row["shape"] == shape}, i)
        bound = {row["rows"]: row["reference_bytes"] / row["bytes"] for row in rows}
        _plot(axes, "bytes", bound, len(shapes), is_bound=True)
        axes.axhline(1, color=FAINT, linewidth=0.8)
        axes.set_ylim(bottom=0)
        style_axes(axes, "rows of activations", "times the speed of dense")
        _finish(figure, axes, (row["rows"] for row in rows))
    return figure


def decode_figure(rows: Sequence[_Row], machine: str) -> Figure:
    """Draw tokens per second by batch, dense and packed, under what memory allows for each.

    Args:
        rows: Of `decode.packed_over_dense`.
        machine: Named below the chart.
    """
    note = (
        f"Greedy, {rows[0]['prompt']} prompt tokens and {rows[0]['tokens']} new ones, {rows[0]['dtype']}. Dashed: "
        f"what reading weights and cache allows. {machine}."
    )
    with own_style():
        figure = titled_figure("Tokens per second in decoding", note, 7, 3.4)
        axes = figure.add_subplot()
        for i, (label, whose) in enumerate((("dense", "reference_"), ("2:4 packed", ""))):
            _plot(axes, label, {row["batch"]: row[f"{whose}tokens_per_s"] for row in rows}, i)
            bound = {row["batch"]: row[f"{whose}most_tokens_per_s"] for row in rows}
            _plot(axes, f"{label}, at most", bound, i, is_bound=True)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        style_axes(axes, "sequences", "tokens per second")
        _finish(figure, axes, (row["batch"] for row in rows))
    return figure


def _plot(axes: Axes, label: str, points: Mapping[int, float], style: int, is_bound: bool = False) -> None:
    """Draw a line, x → y; a bound is dashed, thin and without markers."""
    look = line_style(style, len(points))
    if is_bound:
        look |= {"marker": "", "linewidth": 0.8, "linestyle": (0, (4, 3))}
    axes.plot(list(points), list(points.values()), label=label, **look)


def _finish(figure: Figure, axes: Axes, xs: Iterable[int]) -> None:
    """A logarithmic x with a tick for each value, and the legend beside the panel."""
    ticks = sorted(set(xs))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside right center", frameon=False, fontsize=8.5)
