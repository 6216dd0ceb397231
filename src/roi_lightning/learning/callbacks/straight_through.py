"""Switch between the soft relaxation and straight-through during a run."""

from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from roi_lightning.errors import UserError, check_at_least
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.samplers import GumbelTopK, StraightThrough


class StraightThroughToggle(Callback):
    """Change the estimator at an optimizer step; before it, the sampler of the configuration is used.

    The estimator depends on the step alone, so a checkpoint stores nothing of the switch. The run's recipe and its
    export name both estimators and the step.

    Args:
        at_step: Optimizer step from which on `to` is used.
        to: `straight_through` (hard forward) or `soft` (relaxed forward).

    Raises:
        UserError: If `at_step` is negative, or the sampler is no Gumbel-Top-K.
    """

    def __init__(self, at_step: int, to: Literal["straight_through", "soft"] = "straight_through") -> None:
        self.at_step, self.to = at_step, to
        check_at_least(self, "StraightThroughToggle.", at_step=0)

    def recipe(self) -> dict[str, object]:
        """Which estimator is used from which optimizer step on."""
        return {"StraightThroughToggle": f"{self.to} from step {self.at_step} on"}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, RoILightningModule) or not isinstance(
            pl_module.current_sampler, GumbelTopK
        ):
            raise UserError(
                "StraightThroughToggle works on RoI's samplers (GumbelTopK, StraightThrough) only; leave it out"
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        assert isinstance(pl_module, RoILightningModule)
        sampler = pl_module.current_sampler
        if trainer.global_step >= self.at_step and isinstance(sampler, GumbelTopK):
            kind = StraightThrough if self.to == "straight_through" else GumbelTopK
            if type(sampler) is not kind:
                pl_module.current_sampler = kind(sampler.push_down, sampler.compiled)
