"""Progress of `fit`: a bar in a terminal, else a line every few seconds with a rate and the time left."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from typing_extensions import override

from roi_lightning.utils.progress import Lines, spell_left


class PlainProgress(ProgressBar):
    """Prints one line of progress every few seconds; for output that is not a terminal.

    A line says the optimizer step, or within a long one its micro-batch, the pace, and the time left without
    validation; during validation its batch.

    Args:
        every_seconds: Minimum time between two lines.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        super().__init__()
        self._enabled = True
        self._lines = Lines(every_seconds)
        self._started = self._validation_started = 0.0
        self._first_step = self._told = 0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()
        self._first_step = self._told = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, total, parts = trainer.global_step, trainer.max_steps, trainer.accumulate_grad_batches
        at_end = step == total and self._told != step
        if not self._enabled or (self._lines.due_in > 0 and not at_end):
            return
        self._told = step
        part = (batch_idx + 1) % parts
        pace = (time.monotonic() - self._started) / (step - self._first_step + part / parts)
        where = f"step {step}/{total}" + (f" + micro-batch {part}/{parts}" if part else "")
        metrics = self.get_metrics(trainer, pl_module)
        shown = [f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float)]
        left = spell_left(pace * (total - step - part / parts))
        self._lines.write("  ".join([where, f"{pace:.2f} s/step", left, *shown]))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_started = time.monotonic()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started += time.monotonic() - self._validation_started

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self._enabled or self._lines.due_in > 0:
            return
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        done, total = batch_idx + 1, int(sum(batches))
        pace = (time.monotonic() - self._validation_started) / done
        self._lines.write(f"validation {done}/{total}  {spell_left(pace * (total - done))}")


def with_progress(callbacks: Sequence[Callback]) -> list[Callback]:
    """Add a callback that shows progress if there is none: a bar in a terminal, else lines."""
    if any(isinstance(callback, ProgressBar) for callback in callbacks):
        return list(callbacks)
    return [*callbacks, RichProgressBar() if sys.stderr.isatty() else PlainProgress()]
