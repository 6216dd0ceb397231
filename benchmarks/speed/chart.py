"""How fast 2:4 models run, from the rows of `benchmarks.linear` and `benchmarks.decode`."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

_Row = Mapping[str, Any]


def speedup_figure(rows: Sequence[_Row], machine: str) -> Figure:
    """Draw how much faster packed weights are than dense ones, by rows of activations.

    Args:
        rows: Of `linear.packed_over_dense`.
        machine: Named below the chart.
    """
    figure, axes = _chart(f"Linear layers, 2:4 packed against dense, {rows[0]['dtype']}", machine)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        points = {row["rows"]: row["ratio"] for row in rows if row["shape"] == shape}
        axes.plot(list(points), list(points.values()), "o-", label=shape)
    limit = {row["rows"]: row["reference_bytes"] / row["bytes"] for row in rows}
    axes.plot(list(limit), list(limit.values()), "--", label="limit of the bytes read")
    axes.set_ylim(bottom=0)
    return _finish(
        figure, axes, [row["rows"] for row in rows], "rows of activations", "times the speed of dense"
    )


def decode_figure(rows: Sequence[_Row], machine: str) -> Figure:
    """Draw tokens per second by batch, dense and packed, under what memory allows for each.

    Args:
        rows: Of `decode.packed_over_dense`.
        machine: Named below the chart.
    """
    setting = f"{rows[0]['prompt']} prompt tokens, {rows[0]['tokens']} new ones, {rows[0]['dtype']}"
    figure, axes = _chart(f"Greedy decoding: {setting}", machine)
    batches = [row["batch"] for row in rows]
    for color, (label, whose) in enumerate((("dense", "reference_"), ("2:4 packed", ""))):
        axes.plot(
            batches, [row[f"{whose}tokens_per_s"] for row in rows], "o-", color=f"C{color}", label=label
        )
        limit = [row[f"{whose}most_tokens_per_s"] for row in rows]
        axes.plot(batches, limit, "--", color=f"C{color}", label=f"{label}: limit of the bytes read")
    axes.set_yscale("log")
    return _finish(figure, axes, batches, "sequences", "tokens per second")


def _chart(title: str, machine: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n{machine}", fontsize=9)
    return figure, axes


def _finish(figure: Figure, axes: Axes, xs: Sequence[int], x_label: str, y_label: str) -> Figure:
    """A logarithmic x with a tick for each value, and the legend beside the panel."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(xs)), [str(x) for x in sorted(set(xs))])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=x_label, ylabel=y_label)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure
