"""A sheet on a terminal: beneath each value what it means against the dense model, and its standard error."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roi_lightning.evaluation.sheet import Block, Cell, Sheet

_STYLES: Final = {"": "", "best": "bold", "second": "underline"}
_NAME_WIDTH: Final = (20, 48)  # the least and the most for the models' names
_MARK: Final = "W/U"
_GAP: Final = 2


def print_sheet(sheet: Sheet, console: Console) -> None:
    """Print a table; as several, block by block, where the terminal is too narrow for all columns."""
    names = min(max(map(len, sheet.marks)), _NAME_WIDTH[1])
    fixed = len(_MARK) + 2 * _GAP
    room = console.width - min(names, _NAME_WIDTH[0]) - fixed
    for block in _fitting(sheet, room):
        rest = console.width - _total(_widths(block)) - fixed
        console.print(Text(block.title, "bold"))
        console.print(_table(block, sheet.marks, min(names, max(rest, 1))), "")


def _fitting(sheet: Sheet, room: int) -> Iterator[Block]:
    whole = sheet.joined()
    for block in [whole] if _total(_widths(whole)) <= room else sheet.blocks:
        for start, end in _runs(_widths(block), room):
            rows = {name: cells[start:end] for name, cells in block.rows.items()}
            yield Block(block.title, block.labels[start:end], rows)


def _runs(widths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Runs of columns that fit, at least one column each."""
    start = 0
    while start < len(widths):
        ends = accumulate(width + _GAP for width in widths[start:])
        count = sum(end - _GAP <= room for end in ends)
        yield start, start + max(1, count)
        start += max(1, count)


def _widths(block: Block) -> list[int]:
    found = [max(map(len, label.split())) for label in block.labels]
    for cells in block.rows.values():
        found = [max(w, *map(len, [c.text, *c.notes])) for w, c in zip(found, cells, strict=True)]
    return found


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _table(block: Block, marks: Mapping[str, str], name_width: int) -> Table:
    # The box puts one blank between columns, the padding the rest of the gap.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    table.add_column("model", width=name_width, no_wrap=True)
    table.add_column(_MARK, width=len(_MARK), justify="center")
    for label in block.labels:
        table.add_column(Text(label.replace(" ", "\n")), justify="right", no_wrap=True)
    for number, (name, cells) in enumerate(block.rows.items()):
        if number:
            table.add_row()
        table.add_row(Text(shorten(name, name_width)), marks[name], *map(_content, cells))
    return table


def _content(cell: Cell) -> Text:
    notes = [Text(note, "dim") for note in cell.notes]
    return Text("\n").join([Text(cell.text, _STYLES[cell.rank]), *notes])


def shorten(name: str, width: int) -> str:
    """A name cut on the left: the end of a path is what tells it from others."""
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]
