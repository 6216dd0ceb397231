"""Numbers too small for full precision, taken for zero."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from roi_lightning.native import in_every_thread


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Take denormal numbers for zero, in this thread and torch's own; afterwards they are what they were before.

    Annealed softmaxes make many of them, and they cost a processor a hundred times as much as others.
    """
    before = sys.float_info.min / 2 == 0  # torch sets this and does not tell it
    in_every_thread(lambda: torch.set_flush_denormal(True))
    try:
        yield
    finally:
        in_every_thread(lambda: torch.set_flush_denormal(before))
