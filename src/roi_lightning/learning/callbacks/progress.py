"""Progress of `fit`: a bar in a terminal, else a line every few seconds with a rate and the time left."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from typing_extensions import override


class PlainProgress(ProgressBar):
    """Prints one line of progress every few seconds; for output that is not a terminal.

    Args:
        every_seconds: Minimum time between two lines.
    """

    def __init__(self, every_seconds: float = 20.0) -> None:
        super().__init__()
        self.every_seconds = every_seconds
        self._enabled = True
        self._printed = self._started = 0.0
        self._first_step = 0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._printed = time.monotonic()
        self._first_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        step, total = trainer.global_step, trainer.max_steps
        done = step - self._first_step
        due = now - self._printed >= self.every_seconds or step == total
        if not (self._enabled and due and done > 0):
            return
        self._printed = now
        pace = (now - self._started) / done
        left = timedelta(seconds=round(pace * (total - step)))
        metrics = self.get_metrics(trainer, pl_module)
        shown = "  ".join(
            f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float)
        )
        sys.stderr.write(f"step {step}/{total}  {pace:.2f} s/step  {left} left  {shown}\n")
        sys.stderr.flush()

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        print(*args, **kwargs)


def with_progress(callbacks: Sequence[Callback]) -> list[Callback]:
    """Add a callback that shows progress if there is none: a bar in a terminal, else lines."""
    if any(isinstance(callback, ProgressBar) for callback in callbacks):
        return list(callbacks)
    return [*callbacks, RichProgressBar() if sys.stderr.isatty() else PlainProgress()]
