"""Make up for a validation that an interruption prevented."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage
from typing_extensions import override


class DueValidation(Callback):
    """Keeps in every checkpoint at which step validation was last done; a run that goes on does what is due first.

    Lightning takes a checkpoint of a step at which validation is due for one that was written after it.
    """

    def __init__(self) -> None:
        self._validated: int | None = None
        self._resumed = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"validated": self._validated}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated, self._resumed = state_dict["validated"], True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resumed and self._validated != trainer.global_step:
            # Whether validation is due Lightning asks by itself; this has it do one that is, from its beginning.
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting, loop._restart_stage = False, RestartStage.RESTARTED_MID_EVALUATION

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated = trainer.global_step
