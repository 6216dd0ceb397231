"""Callbacks that do their work once, at the end of training."""

from abc import abstractmethod

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class FinishCallback(Callback):
    """Does its work once, at the end of training.

    A run resumed from its very last checkpoint trains no step, and Lightning then skips the end of training: the
    work, interrupted the first time, is done at the end of fit instead.
    """

    def __init__(self) -> None:
        self._finished = False

    @abstractmethod
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The work."""

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finished = True
        self.finish(trainer, pl_module)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._finished:
            self.finish(trainer, pl_module)
