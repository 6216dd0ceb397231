"""The frame of a speed benchmark: options that all have, the table, and the rows as JSON and picture."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.speed.timing import Ratio
from roi_lightning.errors import UserError
from roi_lightning.utils.atomic_io import check_writable, write_json, written_aside
from roi_lightning.utils.tables import print_table, standard_output

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Head and rows of a table, and the note below it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


@dataclass(frozen=True)
class Script:
    """One benchmark.

    Attributes:
        parser: Has the benchmark's own options, `--device` among them where it isn't the CPU's alone.
        measure: The rows, measured while they are taken.
        table: How rows of the JSON are shown.
        rounds: The default number of rounds.
        figure: A picture of the rows, with the machine's name, for benchmarks that have one.
    """

    parser: argparse.ArgumentParser
    measure: Callable[[argparse.Namespace], Iterable[Ratio]]
    table: Callable[[Sequence[Row], argparse.Namespace], Table]
    rounds: int = 10
    figure: Callable[[Sequence[Row], str], Figure] | None = None

    def run(self, argv: Sequence[str] | None = None) -> None:
        """Measure, print, and write what was asked for; bad input ends the process with one line."""
        add = self.parser.add_argument
        add(
            "--rounds",
            type=positive,
            default=self.rounds,
            help="medians are over these (default: %(default)s)",
        )
        add("--json", metavar="OUT", type=Path, help="also write the rows as JSON")
        if self.figure:
            add("--figure", metavar="OUT", type=Path, help="also draw them, as PNG")
        args = self.parser.parse_args(argv)
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler reports every start and stop
        try:
            self._run(args)
        except UserError as error:
            sys.exit(f"error: {error}")

    def _run(self, args: argparse.Namespace) -> None:
        picture = getattr(args, "figure", None)
        for out in filter(None, (args.json, picture)):
            check_writable(out)
        rows = [ratio.to_json() for ratio in self.measure(args)]
        machine, table = _machine(getattr(args, "device", None)), self.table(rows, args)
        title = f"{machine}; medians of {args.rounds} rounds"
        print_table(table.head, table.rows, title)
        standard_output().print(table.note, highlight=False)
        if args.json:
            write_json(args.json, {"device": machine, "rows": rows})
        if self.figure and picture:
            with written_aside(picture) as partial:
                self.figure(rows, title).savefig(partial, format="png", dpi=200)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Give a parser `--device`."""
    text = "cpu, cuda or cuda:N (default: %(default)s)"
    parser.add_argument("--device", type=torch.device, default="cpu", help=text)


def _machine(device: torch.device | None) -> str:
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def positive(text: str) -> int:
    """A whole number from 1 on, also like 1e6.

    Raises:
        ValueError: If it is anything else.
    """
    number = int(float(text))
    if number < 1:
        raise ValueError(text)
    return number


def numbers(text: str) -> list[int]:
    """Whole numbers from 1 on with commas between them.

    Raises:
        ValueError: If the text is anything else.
    """
    return [positive(part) for part in text.split(",")]


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
