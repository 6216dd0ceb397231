"""Turn the learned distribution into one mask."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.callbacks.finish import FinishCallback
from roi_lightning.errors import UserError
from roi_lightning.learner import MaskLearner
from roi_lightning.run_folder import MASK, MASKS, run_folder


class HardenMasks(FinishCallback):
    """Write the hard mask, top-N of the logits without noise, as a mask file.

    At the end of fit it goes to `<run folder>/mask.safetensors`; with `every_n_steps` also during the run, to
    `<run folder>/masks/step-<step>.safetensors`.

    Args:
        every_n_steps: Optimizer steps between masks written during the run; none if left out.

    Raises:
        UserError: If `every_n_steps` is below 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"HardenMasks.every_n_steps is {every_n_steps}; it must be at least 1")
        super().__init__()
        self.every_n_steps = every_n_steps
        self._last = 0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        step = trainer.global_step
        if self.every_n_steps and step != self._last and step % self.every_n_steps == 0:
            self._last = step
            self._write(trainer, pl_module, f"{MASKS}/step-{step:06d}.safetensors")

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, MASK)

    def _write(self, trainer: Trainer, learner: LightningModule, name: str) -> None:
        assert isinstance(learner, MaskLearner)
        masks, path = learner.packed_masks(), run_folder(trainer) / name
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            learner.mask_set(masks).save(path)
            rank_zero_info(f"hardened {learner.pattern} mask: {path}")
