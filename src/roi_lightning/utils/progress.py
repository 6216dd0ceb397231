"""Progress of long work: a bar on terminals, else a line now and then, both with the time left."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import ClassVar, Final, TypeVar

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
_EVERY_SECONDS: Final = 10.0


class Lines:
    """Lines on standard error, whatever work they are of: one is due when work went on for a while without any.

    Args:
        every_seconds: The while; ten seconds if left out.
    """

    _written: ClassVar = 0.0
    _worked: ClassVar = 0.0

    def __init__(self, every_seconds: float | None = None) -> None:
        self.every_seconds = _EVERY_SECONDS if every_seconds is None else every_seconds
        self._stream = sys.stderr  # even while it is redirected, to silence others
        if time.monotonic() - Lines._worked > _EVERY_SECONDS:  # nothing went on before
            Lines._written = time.monotonic()

    @property
    def due_in(self) -> float:
        """Seconds until the next line is due, asked while work goes on; negative or 0 if it is."""
        Lines._worked = time.monotonic()
        return Lines._written + self.every_seconds - Lines._worked

    def write(self, line: str) -> None:
        """Write a line now."""
        Lines._written = time.monotonic()
        self._stream.write(f"{line}\n")
        self._stream.flush()


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """Report on standard error while items are worked through.

    Args:
        items: The pieces of work, about equally long.
        description: What is being done to them.
    """
    return _bar(items, description) if sys.stderr.isatty() else _lines(items, description)


def _bar(items: Sequence[T], description: str) -> Iterator[T]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _Pace())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, speed_estimate_period=600
    ) as bar:
        yield from bar.track(items, description=description)


class _Pace(ProgressColumn):
    """Seconds a piece, or pieces a second."""

    @override
    def render(self, task: Task) -> Text:
        return Text(_spelled(1 / task.speed) if task.speed else "")


def _lines(items: Sequence[T], description: str) -> Iterator[T]:
    started, lines = time.monotonic(), Lines()
    if items and lines.due_in <= 0:
        lines.write(f"{description} 0/{len(items)}")
    for done, item in enumerate(items, 1):
        yield item
        if lines.due_in <= 0:
            pace = (time.monotonic() - started) / done
            lines.write(
                f"{description} {done}/{len(items)}  {_spelled(pace)}  {spell_left(pace * (len(items) - done))}"
            )


def spell_left(seconds: float) -> str:
    """`0:01:30 left`."""
    return f"{timedelta(seconds=round(seconds))} left"


@contextmanager
def working(description: str, *, has_bar: bool = False) -> Iterator[None]:
    """Report on standard error that work goes on of which nobody knows how much is left: for how long by now.

    Args:
        description: What is being done.
        has_bar: Whether a library that does it shows its own bar on terminals.
    """
    if sys.stderr.isatty():
        with nullcontext() if has_bar else Console(stderr=True).status(Text(f"{description} …")):
            yield
        return
    lines, started, finished = Lines(), time.monotonic(), threading.Event()

    def report() -> None:
        while not finished.wait(max(lines.due_in, 0)):
            if lines.due_in <= 0:
                taken = timedelta(seconds=round(time.monotonic() - started))
                lines.write(f"{description}  {taken} so far")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        finished.set()
        reporter.join()


def _spelled(pace: float) -> str:
    return f"{pace:.2f} s each" if pace >= 1 else f"{1 / pace:.2f}/s"
