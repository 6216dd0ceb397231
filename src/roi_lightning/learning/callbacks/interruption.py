"""Interrupted runs lose nothing: a checkpoint on SIGTERM."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.learning.resume import modified
from roi_lightning.learning.run_folder import CHECKPOINTS, model_checkpoints, run_folder

# A shell's status for a process that SIGTERM ended, which schedulers take for "run it again".
STATUS: Final = 128 + signal.SIGTERM


class PreemptedError(SystemExit):
    """Ends the process with status 143."""

    def __init__(self) -> None:
        super().__init__(STATUS)


class Preemption(Callback):
    """On SIGTERM, write a checkpoint after the current micro-batch and exit with status 143.

    The last step is saved too, before the results are written: a run that is ended while it writes them exits at once
    (no file is replaced before it is complete) and has lost no step either. This handler replaces Lightning's, which
    saves nothing.

    Attributes:
        resumed_from: The checkpoint that `--resume auto` chose; removed when a newer one has been written.
    """

    def __init__(self) -> None:
        self.resumed_from: str | None = None
        self._signalled = self._training = False

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self._training = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._exit_if_preempted(trainer)
        self._remove_resumed(trainer)

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self._training:
            self._exit_if_preempted(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exit_if_preempted(trainer)
        self._training = False
        if _step_checkpoints(trainer):
            _save_now(trainer)
            self._remove_resumed(trainer)

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._training:
            raise PreemptedError
        self._signalled = True

    def _exit_if_preempted(self, trainer: Trainer) -> None:
        # Signals reach the ranks at different moments; they exit together.
        if not trainer.strategy.reduce_boolean_decision(self._signalled, all=False):
            return
        if trainer.global_step:
            path = _save_now(trainer)
            self._remove_resumed(trainer)
            rank_zero_info(
                f"ended by SIGTERM; step {trainer.global_step} is saved: {path}; resume with --resume auto"
            )
        raise PreemptedError

    def _remove_resumed(self, trainer: Trainer) -> None:
        """ModelCheckpoint spares what a run resumed from: after a few interruptions these would fill the disk."""
        old = self.resumed_from
        newer = [each.best_model_path for each in _step_checkpoints(trainer) if each.save_top_k == 1]
        if old and any(modified(path) > modified(old) for path in newer):
            trainer.strategy.remove_checkpoint(old)
            self.resumed_from = None


def _save_now(trainer: Trainer) -> Path:
    """Write a checkpoint of the last optimizer step, if that has none yet.

    Args:
        trainer: In the middle of fit. Its first ModelCheckpoint without a monitor manages the checkpoint like its
            others; without one it goes to `checkpoints/` in the run folder.

    Returns:
        The checkpoint.
    """
    keeper = next(iter(_step_checkpoints(trainer)), None)
    if keeper is None:
        path = run_folder(trainer) / CHECKPOINTS / f"step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        return path
    if keeper._last_global_step_saved != trainer.global_step:
        # No public method saves on demand: https://github.com/Lightning-AI/pytorch-lightning/issues/1658.
        metrics = keeper._monitor_candidates(trainer)
        keeper._save_topk_checkpoint(trainer, metrics)
        keeper._save_last_checkpoint(trainer, metrics)
    return Path(keeper.best_model_path)


def _step_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks that keep checkpoints by their step alone."""
    return [each for each in model_checkpoints(trainer) if each.monitor is None and each.save_top_k]
