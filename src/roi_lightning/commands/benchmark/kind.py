"""What a kind of benchmark brings: its options, what it measures, and how that is shown."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure as Picture

    from roi_lightning.bench.timing import Figure

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Heads and rows of a table, and the note below it."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


@dataclass(frozen=True)
class Kind:
    """One kind of benchmark.

    Attributes:
        help: A line for the list of kinds.
        rounds: How many, unless told otherwise.
        add_options: Adds the kind's own options to its parser.
        measure: The figures, measured while they are taken.
        table: How rows of the JSON are shown.
        picture: A picture of them, from rows and the title, for kinds that have one.
    """

    help: str
    rounds: int
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, "torch.device"], Iterable["Figure"]]
    table: Callable[[Sequence[Row], argparse.Namespace], Table]
    picture: "Callable[[Sequence[Row], str], Picture] | None" = None
