"""Cells that the tables of several benchmarks have."""

from roi_lightning.commands.benchmark.kind import Row


def times(row: Row, whose: str = "") -> tuple[str, str]:
    """Median in milliseconds, and how far the rounds lie apart.

    Args:
        row: Of the JSON.
        whose: Empty, or `reference_`.
    """
    return f"{1e3 * row[f'{whose}median_s']:,.1f}", spread(row, whose)


def spread(row: Row, whose: str = "") -> str:
    """The slowest round less the quickest, ÷ the median."""
    middle, least, most = (row[f"{whose}{kind}_s"] for kind in ("median", "min", "max"))
    return f"{(most - least) / middle:.0%}"
