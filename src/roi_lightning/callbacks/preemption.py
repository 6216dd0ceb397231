"""End a run that its scheduler takes the machine from, without losing a step."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.run_folder import CHECKPOINTS, run_folder

# What a shell reports of a process that SIGTERM ended, and schedulers take for "run it again".
STATUS: Final = 128 + signal.SIGTERM


class PreemptedError(SystemExit):
    """Ends the process with status 143."""

    def __init__(self) -> None:
        super().__init__(STATUS)


class Preemption(Callback):
    """On SIGTERM, write a checkpoint after the micro-batch at hand and exit with status 143.

    When the last step is done it is saved too, before the results are written: a run ended while it writes them (at
    once: they are written aside) has lost no step either. Lightning's own handling of the signal, which saves
    nothing, is put aside.

    Attributes:
        resumed_from: The checkpoint that `--resume auto` chose; removed when a newer one has been written.
    """

    def __init__(self) -> None:
        self.resumed_from: str | None = None
        self._told = self._training = False

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self._training = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._leave_if_told(trainer)
        self._forget_resumed(trainer)

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self._training:
            self._leave_if_told(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_if_told(trainer)
        self._training = False
        if keepers(trainer):
            save_now(trainer)
            self._forget_resumed(trainer)

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self._training:
            raise PreemptedError
        self._told = True

    def _leave_if_told(self, trainer: Trainer) -> None:
        # Signals reach the ranks at different moments; they leave together.
        if not trainer.strategy.reduce_boolean_decision(self._told, all=False):
            return
        if trainer.global_step:
            path = save_now(trainer)
            self._forget_resumed(trainer)
            rank_zero_info(
                f"ended by SIGTERM; step {trainer.global_step} is saved: {path}; go on with --resume auto"
            )
        raise PreemptedError

    def _forget_resumed(self, trainer: Trainer) -> None:
        """ModelCheckpoint spares what a run went on from: after a few interruptions these would fill the disk."""
        old, newer = (
            self.resumed_from,
            [keeper.best_model_path for keeper in keepers(trainer) if keeper.save_top_k == 1],
        )
        if old and any(_written(path) > _written(old) for path in newer):
            trainer.strategy.remove_checkpoint(old)
            self.resumed_from = None


def save_now(trainer: Trainer) -> Path:
    """Write a checkpoint of the last optimizer step, if that has none yet.

    Args:
        trainer: In the middle of fit. Its first ModelCheckpoint without a monitor keeps the checkpoint as it keeps
            others; without one it goes to `checkpoints/` in the run folder.

    Returns:
        The checkpoint.
    """
    keeper = next(iter(keepers(trainer)), None)
    if keeper is None:
        path = run_folder(trainer) / CHECKPOINTS / f"step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        return path
    if keeper._last_global_step_saved != trainer.global_step:
        metrics = keeper._monitor_candidates(trainer)
        keeper._save_topk_checkpoint(trainer, metrics)
        keeper._save_last_checkpoint(trainer, metrics)
    return Path(keeper.best_model_path)


def keepers(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks that keep checkpoints by their step alone."""
    found = (callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint))  # type: ignore[attr-defined]
    return [callback for callback in found if callback.monitor is None and callback.save_top_k]


def _written(path: str) -> int:
    return Path(path).stat().st_mtime_ns if path and Path(path).exists() else 0
