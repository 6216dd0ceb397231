"""A kind of benchmark, and what several kinds share: table cells, options that take several numbers."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roi_lightning.errors import UserError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from roi_lightning.benchmark.timing import Ratio

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Head and rows of a table, and the note below it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


@dataclass(frozen=True)
class Kind:
    """One kind of benchmark.

    Attributes:
        help: A line for the list of kinds.
        rounds: The default number of rounds.
        add_options: Adds the kind's own options to its parser.
        measure: The rows, measured while they are taken.
        table: How rows of the JSON are shown.
        figure: A picture of them, from rows and the title, for kinds that have one.
    """

    help: str
    rounds: int
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, "torch.device"], Iterable["Ratio"]]
    table: Callable[[Sequence[Row], argparse.Namespace], Table]
    figure: "Callable[[Sequence[Row], str], Figure] | None" = None


def times(row: Row, whose: str = "") -> tuple[str, str]:
    """Median in milliseconds, and the range of the rounds.

    Args:
        row: Of the JSON.
        whose: Empty, or `reference_`.
    """
    return f"{1e3 * row[f'{whose}median_s']:,.1f}", spread(row, whose)


def spread(row: Row, whose: str = "") -> str:
    """The slowest round less the fastest, ÷ the median."""
    return f"{(row[f'{whose}max_s'] - row[f'{whose}min_s']) / row[f'{whose}median_s']:.0%}"


def numbers(option: str, text: str, example: str) -> list[int]:
    """Positive whole numbers with commas between them.

    Raises:
        UserError: If the text is anything else; the message names the option and shows the example.
    """
    try:
        found = [int(float(part)) for part in text.split(",")]
    except (ValueError, OverflowError):
        found = []
    if not found or min(found) < 1:
        raise UserError(f"{option} {text!r}: give positive whole numbers, like {example}")
    return found
