"""Write the sparse checkpoint when training ends."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from roi_lightning.callbacks.finish import FinishCallback
from roi_lightning.callbacks.run_folder import run_folder
from roi_lightning.data import CalibrationDataModule
from roi_lightning.export import check_destination, needed_bytes, open_base, write_export
from roi_lightning.learner import MaskLearner


class SparseExport(FinishCallback):
    """Write and verify a Hugging Face directory with the hardened mask at the end of fit.

    Args:
        out: The directory; `<run folder>/export` if left out. Checked before training starts.
    """

    def __init__(self, out: str | None = None) -> None:
        super().__init__()
        self.out = out
        self.path: Path | None = None

    def destination(self, trainer: Trainer) -> Path:
        """The directory this run will write."""
        return Path(self.out) if self.out else run_folder(trainer) / "export"

    def preflight(self, trainer: Trainer) -> None:
        """Refuse a destination that is not ours to replace, before any work is done.

        Raises:
            UserError: Naming the directory.
        """
        check_destination(self.destination(trainer), None)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearner)
        base = open_base(pl_module.source, pl_module.stored_dtype, pl_module.whole_lm)
        check_destination(self.destination(trainer), needed_bytes(base))

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearner)
        masks, out = pl_module.packed_masks(), self.destination(trainer)
        if not trainer.is_global_zero:
            return
        perplexity = trainer.callback_metrics.get("val/perplexity")
        data, steps = trainer.datamodule, trainer.global_step  # type: ignore[attr-defined]
        text: dict[str, object] = {}
        if isinstance(data, CalibrationDataModule):
            windows = steps * trainer.accumulate_grad_batches * trainer.world_size * data.batch_size
            text = data.facts(windows)
        training = {"steps": steps, **pl_module.training_facts(), **text}
        self.path = write_export(
            pl_module.source,
            pl_module.mask_set(masks),
            out,
            dtype=pl_module.stored_dtype,
            training=training,
            lm=pl_module.whole_lm,
            perplexity=None if perplexity is None else {"held-out": float(perplexity)},
        )
        rank_zero_info(f"exported and verified: {self.path}")
