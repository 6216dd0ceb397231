"""Tables, on a terminal and in Markdown."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH: Final = 160


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | Text] | None],
    title: str = "",
    *,
    left: int = 1,
    box: Box = HEAVY_HEAD,
    console: Console | None = None,
) -> None:
    """Print a table on standard output.

    Args:
        head: Of the columns; only empty ones for none at all.
        rows: As many cells each, taken literally, not as markup. None is a rule across the table.
        title: What stands above.
        left: How many columns, from the first on, are aligned left; the others are aligned right.
        box: How it is drawn.
        console: Where to; standard output if left out, at least 160 columns wide where that is no terminal.
    """
    table = Table(title=Text(title, "italic") if title else None, box=box, show_header=any(head))
    for i, name in enumerate(head):
        table.add_column(Text(name), justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    (console or standard_output()).print(table)


def standard_output() -> Console:
    """The terminal, or a pipe that is wide enough for every table."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    return console


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table as GitHub shows it; the cells are Markdown themselves.

    Args:
        head: Of the columns.
        rows: As many cells each.
        left: How many columns, from the first on, are aligned left; the others are aligned right.
    """
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in (head, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


SUMMARY_HEAD: Final = ("mask", "perplexity", "÷ dense", "zeros, pruned layers", "zeros, model")


def summary_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Make the rows of the table, one for each mask.

    Args:
        summary: The content of `summary.json`.
    """
    perplexity: Mapping[str, float] = summary["perplexity"]
    rows = []
    for name, value in perplexity.items():
        zeros = {"prunable": 0.0, "model": 0.0} if name == "dense" else summary["zeros"]
        ratio = f"{value / perplexity['dense']:.2f}"
        rows.append([name, f"{value:,.2f}", ratio, f"{zeros['prunable']:.1%}", f"{zeros['model']:.1%}"])
    return rows


def show_summary(path: Path) -> None:
    """Print the table of a `summary.json`, and where the results are."""
    summary = json.loads(path.read_text())
    pattern = summary["pattern"] + (", mixed patterns" if "mixed_patterns" in summary else "")
    title = f"held-out perplexity at {pattern}: {summary['steps']} steps, {summary['seconds']:.0f} s"
    print_table(SUMMARY_HEAD, summary_rows(summary), title)
    export, here = Path(summary["export"] or ""), Path.cwd()
    shown = export.relative_to(here) if export.is_relative_to(here) else export
    checkpoint = f"checkpoint {shown}\n" if summary["export"] else ""
    sys.stdout.write(f"metrics    {path}\n{checkpoint}")
