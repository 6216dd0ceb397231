"""A progress bar for terminals."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """Show a bar on standard error while items are worked through, if that is a terminal."""
    if not sys.stderr.isatty():
        return items
    return track(items, description, console=Console(stderr=True), transient=True)
