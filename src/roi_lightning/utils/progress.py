"""Progress of long work: a bar on terminals, else a line now and then, both with a rate and the time left."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from typing_extensions import override

T = TypeVar("T")
_EVERY_SECONDS: Final = 20.0


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """Report on standard error while items are worked through.

    Args:
        items: The pieces of work, about equally long.
        description: What is being done to them.
    """
    return _bar(items, description) if sys.stderr.isatty() else _lines(items, description)


def _bar(items: Sequence[T], description: str) -> Iterator[T]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _Pace())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=600,
    ) as bar:
        yield from bar.track(items, description=description)


def _lines(items: Sequence[T], description: str) -> Iterator[T]:
    started = printed = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - printed >= _EVERY_SECONDS:
            printed = now
            pace = (now - started) / done
            left = timedelta(seconds=round(pace * (len(items) - done)))
            sys.stderr.write(f"{description} {done}/{len(items)}  {_spelled(pace)}  {left} left\n")
            sys.stderr.flush()


class _Pace(ProgressColumn):
    """Seconds a piece, or pieces a second."""

    @override
    def render(self, task: Task) -> Text:
        return Text(_spelled(1 / task.speed) if task.speed else "")


def _spelled(pace: float) -> str:
    return f"{pace:.2f} s each" if pace >= 1 else f"{1 / pace:.2f}/s"
