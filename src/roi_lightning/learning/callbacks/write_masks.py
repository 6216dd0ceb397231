"""Write what a run has learned: mask files, and the sparse checkpoint when training ends."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import check_at_least, user_path
from roi_lightning.export import check_destination, needed_bytes, write_export
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.recipe import callback_recipes, fingerprint, spelled
from roi_lightning.learning.run_folder import MASK, MASKS, run_folder
from roi_lightning.masks.mask_set import EXPORT


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


class HardenMasks(FinishCallback):
    """Write the hard mask, top-N of the logits without noise, as a mask file.

    At the end of fit it goes to `<run folder>/mask.safetensors`; with `every_n_steps` also during the run, to
    `<run folder>/masks/step-<step>.safetensors`.

    Args:
        every_n_steps: Optimizer steps between masks that are also written during the run; if left out, none are.

    Raises:
        UserError: If `every_n_steps` is below 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        check_at_least(self, "HardenMasks.", every_n_steps=1)
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
        assert isinstance(learner, MaskLearningModule)
        masks = learner.final_masks if name == MASK else learner.packed_masks()
        updates = learner.final_updates if name == MASK else None
        path = run_folder(trainer) / name
        if trainer.is_global_zero:
            learner.mask_set(masks, updates).save(path)
            rank_zero_info(f"hardened {learner.pattern} mask: {path}")


class SparseExport(FinishCallback):
    """Write and verify a Hugging Face directory with the hardened mask at the end of fit.

    Args:
        out: The directory; `<run folder>/export` if left out. Checked before training starts.

    Attributes:
        overwrite: Whether another run's export there may be replaced, as `fit` was called with.
    """

    def __init__(self, out: str | None = None) -> None:
        super().__init__()
        self.out, self.overwrite = out, False
        self.path: Path | None = None

    def destination(self, trainer: Trainer) -> Path:
        """The directory this run will write."""
        return user_path(self.out) if self.out else run_folder(trainer) / EXPORT

    def preflight(self, trainer: Trainer, recipe: Mapping[str, Any], size: int | None = None) -> None:
        """Refuse a destination that is not this run's to replace, before any work is done.

        Args:
            trainer: Of the run.
            recipe: The run's; its own earlier export may be replaced.
            size: In bytes, see `needed_bytes`, once it is known.

        Raises:
            UserError: Naming the directory.
        """
        check_destination(self.destination(trainer), size, overwrite=self.overwrite, run=fingerprint(recipe))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        self.preflight(trainer, pl_module.run_recipe, needed_bytes(pl_module.base))

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        run, out = fingerprint(pl_module.run_recipe), self.destination(trainer)
        self.path = export_learned(pl_module, trainer, out, overwrite=self.overwrite, run=run)
        rank_zero_info(f"exported and verified: {self.path}")


def export_learned(
    learner: MaskLearningModule,
    trainer: Trainer,
    out: Path,
    *,
    overwrite: bool = False,
    run: str | None = None,
    windows_per_step: int | None = None,
) -> Path | None:
    """Write what a learner has learned, in a fit or up to the checkpoint it has loaded; every rank has to call it.

    Args:
        learner: Its masks, its weights if it has changed any, and how they were learned are written.
        trainer: Its own.
        out: The directory to make.
        overwrite: Replace an earlier export at `out`.
        run: The fingerprint of a run whose own earlier export is replaced all the same.
        windows_per_step: Of the run, if they are not those of this trainer.

    Returns:
        The directory, absolute; None on other ranks than the first.

    Raises:
        UserError: If `out` can't be used, or the result does not verify.
    """
    masks, updates = learner.final_masks, learner.final_updates
    if not trainer.is_global_zero:
        return None
    steps = trainer.global_step or learner.loaded_step
    perplexity = trainer.callback_metrics.get("val/perplexity")
    training = {
        "steps": steps,
        "learner": type(learner).__name__,
        "method": learner.method,
        "seed": learner.seed,
        **{name: spelled(value) for name, value in learner.settings().items()},
        **callback_recipes(trainer),
        **text_facts(trainer, steps, windows_per_step),
        "fingerprint": fingerprint(learner.run_recipe),
    }
    return write_export(
        learner.base,
        learner.mask_set(masks, updates),
        out,
        updates=updates,
        training=training,
        perplexity=None if perplexity is None else {"held-out": float(perplexity)},
        overwrite=overwrite,
        run=run,
    )


def text_facts(trainer: Trainer, steps: int, windows_per_step: int | None = None) -> dict[str, object]:
    """What a run has read after so many steps; of so many windows, if they are not those of this trainer."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, CalibrationDataModule):
        return {}
    here = trainer.accumulate_grad_batches * trainer.world_size * data.batch_size
    return data.facts(steps * (windows_per_step or here))
