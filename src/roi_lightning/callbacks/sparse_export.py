"""Write the sparse checkpoint when training ends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.callbacks.finish import FinishCallback
from roi_lightning.data import CalibrationDataModule
from roi_lightning.export import check_destination, needed_bytes, open_base, write_export
from roi_lightning.learner import MaskLearner
from roi_lightning.masks import MaskSet
from roi_lightning.recipe import callback_recipes, fingerprint
from roi_lightning.run_folder import EXPORT, run_folder


class SparseExport(FinishCallback):
    """Write and verify a Hugging Face directory with the hardened mask at the end of fit.

    Args:
        out: The directory; `<run folder>/export` if left out. Checked before training starts.

    Attributes:
        overwrite: Whether another run's export there may be replaced, as `fit` was told.
    """

    def __init__(self, out: str | None = None) -> None:
        super().__init__()
        self.out, self.overwrite = out, False
        self.path: Path | None = None

    def destination(self, trainer: Trainer) -> Path:
        """The directory this run will write."""
        return Path(self.out) if self.out else run_folder(trainer) / EXPORT

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
        assert isinstance(pl_module, MaskLearner)
        base = open_base(pl_module.source, pl_module.stored_dtype, pl_module.whole_lm)
        self.preflight(trainer, pl_module.run_recipe, needed_bytes(base))

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearner)
        masks, recipe = pl_module.packed_masks(), pl_module.run_recipe
        if not trainer.is_global_zero:
            return
        perplexity = trainer.callback_metrics.get("val/perplexity")
        data, steps = trainer.datamodule, trainer.global_step  # type: ignore[attr-defined]
        text: dict[str, object] = {}
        if isinstance(data, CalibrationDataModule):
            text = data.facts(steps * trainer.accumulate_grad_batches * trainer.world_size * data.batch_size)
        self.path = export_learned(
            pl_module,
            pl_module.mask_set(masks),
            self.destination(trainer),
            training_facts(pl_module, trainer, steps, text, recipe),
            perplexity=None if perplexity is None else {"held-out": float(perplexity)},
            overwrite=self.overwrite,
            run=fingerprint(recipe),
        )
        rank_zero_info(f"exported and verified: {self.path}")


def export_learned(
    learner: MaskLearner, masks: MaskSet, out: Path, training: Mapping[str, object], **options: Any
) -> Path:
    """Write what a learner has learned.

    Args:
        learner: On any model.
        masks: From its `mask_set`.
        out: The directory to make.
        training: From `training_facts`.
        options: Of `write_export`.

    Returns:
        The directory, absolute.
    """
    dtype, lm = learner.stored_dtype, learner.whole_lm
    return write_export(learner.source, masks, out, training=training, dtype=dtype, lm=lm, **options)


def training_facts(
    learner: MaskLearner,
    trainer: Trainer,
    steps: int,
    text: Mapping[str, object],
    recipe: Mapping[str, Any],
) -> dict[str, object]:
    """How a mask was learned, for the sidecar and the card of an export.

    Args:
        learner: The learner, configured as in the run.
        trainer: Likewise.
        steps: Optimizer steps made.
        text: What is to be said of the text.
        recipe: Of the run.
    """
    method = learner.training_facts() | callback_recipes(trainer)
    return {"steps": steps, **method, **text, "fingerprint": fingerprint(recipe)}
