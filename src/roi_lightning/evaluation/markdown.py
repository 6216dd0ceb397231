"""A sheet as a GitHub table."""

from collections.abc import Sequence
from typing import Final

from roi_lightning.evaluation.sheet import Cell, Sheet

_MARKS: Final = {"": ("", ""), "best": ("**", "**"), "second": ("<u>", "</u>")}


def to_markdown(sheets: Sequence[Sheet], caption: str) -> str:
    """The tables one after the other, each under its title, and the caption: **best**, <u>second</u>."""
    return "\n".join([*map(_table, sheets), caption, ""])


def _table(sheet: Sheet) -> str:
    block = sheet.joined()
    header = ["model", "W/U", *block.labels]
    aligned = [":---", ":---:", *["---:"] * len(block.labels)]
    rows = [[_escape(name), sheet.marks[name], *map(_content, cells)] for name, cells in block.rows.items()]
    lines = ["| " + " | ".join(row) + " |" for row in (header, aligned, *rows)]
    return "\n".join([f"**{block.title}**", "", *lines, ""])


def _content(cell: Cell) -> str:
    before, after = _MARKS[cell.rank]
    value = f"{before}{cell.text}{after}"
    return "<br>".join([value, *(f"<sub>{note}</sub>" for note in cell.notes)])


def _escape(name: str) -> str:
    return name.replace("|", "\\|")
