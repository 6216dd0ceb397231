"""How fast 2:4 models run, from the rows of `benchmark linear` and `benchmark decode`."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from roi_lightning.figures.chart import Chart, Line

_Row = Mapping[str, Any]


def speedup_figure(rows: Sequence[_Row], machine: str) -> Figure:
    """Draw how much faster packed weights are than dense ones, by rows of activations.

    Args:
        rows: Of `linear.packed_over_dense`.
        machine: Named below the title.
    """
    lines = [
        Line(shape, {row["rows"]: row["ratio"] for row in rows if row["shape"] == shape}, i)
        for i, shape in enumerate(dict.fromkeys(row["shape"] for row in rows))
    ]
    most = {row["rows"]: row["reference_bytes"] / row["bytes"] for row in rows}
    chart = Chart(
        f"Linear layers, 2:4 packed against dense, {rows[0]['dtype']}",
        f"Above 1: packed is faster. Dashed: what the bytes allow where reading them takes all the time. {machine}.",
        "rows of activations",
        "times the speed of dense",
        "linear",
        level=1,
    )
    return chart.draw([*lines, Line("bytes", most, len(lines), "bound")])


def decode_figure(rows: Sequence[_Row], machine: str) -> Figure:
    """Draw tokens per second by batch, dense and packed, under what memory allows for each.

    Args:
        rows: Of `decode.packed_over_dense`.
        machine: Named below the title.
    """
    lines = []
    for i, (label, whose) in enumerate((("dense", "reference_"), ("2:4 packed", ""))):
        measured, bound = (
            {row["batch"]: row[f"{whose}{key}"] for row in rows}
            for key in ("tokens_per_s", "most_tokens_per_s")
        )
        lines += [Line(label, measured, i), Line(f"{label}, at most", bound, i, "bound")]
    first = rows[0]
    chart = Chart(
        "Tokens per second in decoding",
        f"Greedy, {first['prompt']} tokens of prompt and {first['tokens']} new ones, {first['dtype']}. Dashed: what "
        f"reading weights and cache allows. {machine}.",
        "sequences",
        "tokens per second",
        "log",
    )
    return chart.draw(lines)
