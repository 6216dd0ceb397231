"""Interrupted runs lose nothing: a checkpoint on SIGTERM and on Ctrl-C."""

import signal
import sys
import threading
from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.learning.resume import modified
from roi_lightning.learning.run_folder import CHECKPOINTS, model_checkpoints, run_folder


class PreemptedError(SystemExit):
    """Ends the process with a shell's status for what a signal ended, which schedulers take for "run it again"."""


class Preemption(Callback):
    """On SIGTERM or Ctrl-C, write a checkpoint after the current micro-batch and exit with status 143 or 130.

    Ctrl-C after either kills it. The last step is saved too, before the results are written: a run that is ended
    while it writes them exits at once; no file is replaced before it is complete. In notebooks Ctrl-C is Lightning's.

    Attributes:
        resumed_from: The checkpoint that `--resume auto` chose; removed when a newer one has been written.
    """

    def __init__(self) -> None:
        self.resumed_from: str | None = None
        self._signal, self._training, self._saved = 0, False, ""

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
            self._save(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, PreemptedError):
            cause = "Ctrl-C" if exception.code == 128 + signal.SIGINT else "SIGTERM"
            rank_zero_info(f"ended by {cause}{self._saved}")

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)
            if not hasattr(sys, "ps1"):
                signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not self._training:
            raise PreemptedError(128 + signum)
        self._signal = signum
        rank_zero_info("ending after this micro-batch; Ctrl-C ends at once and saves nothing")

    def _exit_if_preempted(self, trainer: Trainer) -> None:
        # Signals reach the ranks at different moments; they exit together.
        if not trainer.strategy.reduce_boolean_decision(self._signal > 0, all=False):
            return
        by_hand = trainer.strategy.reduce_boolean_decision(self._signal == signal.SIGINT, all=False)
        if trainer.global_step and model_checkpoints(trainer):
            self._save(trainer)
        raise PreemptedError(128 + (signal.SIGINT if by_hand else signal.SIGTERM))

    def _save(self, trainer: Trainer) -> None:
        """Write a checkpoint of the last optimizer step, if that has none yet.

        The first ModelCheckpoint without a monitor manages it like its others; with none it goes to `checkpoints/`.
        """
        keeper = next(iter(_step_checkpoints(trainer)), None)
        if keeper is None:
            path = str(run_folder(trainer) / CHECKPOINTS / f"step={trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
        else:
            if keeper._last_global_step_saved != trainer.global_step:
                # No public method saves on demand: https://github.com/Lightning-AI/pytorch-lightning/issues/1658.
                metrics = keeper._monitor_candidates(trainer)
                keeper._save_topk_checkpoint(trainer, metrics)
                keeper._save_last_checkpoint(trainer, metrics)
            path = keeper.best_model_path
        self._saved = f"; step {trainer.global_step} is saved: {path}; resume with --resume auto"
        self._remove_resumed(trainer)

    def _remove_resumed(self, trainer: Trainer) -> None:
        """ModelCheckpoint spares what a run resumed from: after a few interruptions these would fill the disk."""
        old = self.resumed_from
        newer = [each.best_model_path for each in _step_checkpoints(trainer) if each.save_top_k == 1]
        if old and any(modified(path) > modified(old) for path in newer):
            trainer.strategy.remove_checkpoint(old)
            self.resumed_from = None


def _step_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks that keep checkpoints by their step alone."""
    return [each for each in model_checkpoints(trainer) if each.monitor is None and each.save_top_k]
