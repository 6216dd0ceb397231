"""The table that a run ends with: the learned mask beside those that need no training."""

import time
from collections.abc import Iterator

from lightning.pytorch import LightningModule, Trainer
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import check_at_least
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.callbacks.write_masks import FinishCallback, SparseExport
from roi_lightning.learning.run_folder import SUMMARY, run_folder
from roi_lightning.utils.atomic_io import write_json
from roi_lightning.utils.progress import progress


class BaselineSummary(FinishCallback):
    """Held-out perplexity and zeros of the dense model, the magnitude mask, the prior and the learned mask.

    Printed as a table and written as `summary.json` into the run folder: perplexities by name, the learned mask
    under its method's (`roi`, `maskllm`, `proxsparse`), seconds since this process set up the run, whether it resumed
    it, and the path of the export, if there was one. List it after `SparseExport`.

    Args:
        windows: Held-out windows measured, at most as many as the data module holds out.

    Raises:
        UserError: If `windows` is below 1.
    """

    def __init__(self, windows: int = 16) -> None:
        super().__init__()
        self.windows = windows
        check_at_least(self, "BaselineSummary.", windows=1)
        self._started = time.monotonic()

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        from roi_lightning.evaluation.perplexity import token_perplexity

        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, CalibrationDataModule)
        windows = data.windows("val", min(self.windows, data.val_tokens // data.seq_len))
        labels, perplexity = data.held_out_labels(len(windows)), {}
        for name, lm in _candidates(pl_module):
            pieces = progress(windows.split(1), f"held-out perplexity, {name}")
            counted = None if labels is None else labels.split(1)
            with pl_module.compiler.eager():
                perplexity[name] = token_perplexity(lm, pieces, counted)
        # Every rank has taken part so far: the model may be sharded.
        if not trainer.is_global_zero:
            return
        export = next((c.path for c in trainer.callbacks if isinstance(c, SparseExport)), None)  # type: ignore[attr-defined]
        summary = {
            "perplexity": perplexity,
            "pattern": str(pl_module.pattern),
            **pl_module.mixed_patterns,
            "zeros": _zero_fractions(pl_module),
            "held_out_tokens": windows.numel(),
            "steps": trainer.global_step,
            "seconds": round(time.monotonic() - self._started, 1),
            "resumed": trainer.ckpt_path is not None,
            "export": None if export is None else str(export),
        }
        path = run_folder(trainer) / SUMMARY
        write_json(path, summary)
        from roi_lightning.utils.tables import show_summary

        show_summary(path)


def _candidates(module: MaskLearningModule) -> Iterator[tuple[str, PreTrainedModel]]:
    """Models by name; the student, which most of them are, is another one each time."""
    teacher, _ = module.models()
    yield "dense", teacher
    yield "magnitude", module.harden(module.magnitude_masks)
    if module.prior_name not in (None, "magnitude"):
        yield module.prior_name, module.harden(module.prior_masks)
    yield module.method, module.harden()


def _zero_fractions(module: MaskLearningModule) -> dict[str, float]:
    """Fraction of zeros that the patterns make among the prunable weights, and among all parameters."""
    kept, prunable = module.kept_of_prunable
    every = sum(parameter.numel() for parameter in module.models()[0].parameters())
    return {"prunable": (prunable - kept) / prunable, "model": (prunable - kept) / every}
