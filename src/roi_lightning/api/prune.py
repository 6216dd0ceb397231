"""Masks without training for a model in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data import CalibrationDataModule, Corpus
from roi_lightning.errors import UserError
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import open_base
from roi_lightning.models.fingerprint import base_of
from roi_lightning.models.loading import frozen_view
from roi_lightning.oneshot.config import PruneConfig
from roi_lightning.oneshot.prune import calibration_text, prune_model


@dataclass(frozen=True, eq=False)
class PruneResult:
    """What a method makes of a model.

    Attributes:
        masks: What to keep.
        updates: Masked weights whose kept values changed (SparseGPT's), by names on disk, on the CPU; the masks need
            them.
    """

    masks: MaskSet
    updates: dict[str, Tensor]


def prune(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    corpora: str | Sequence[Corpus | str] = (),
    **options: Any,
) -> PruneResult:
    """Choose masks as the command `prune` does; the model stays as it is.

    Args:
        lm: Any causal language model, all of it on one device.
        tokenizer: The model's tokenizer; magnitude needs none.
        corpora: Calibration text: files, globs, hub ids, `python-docs`, or `Corpus` objects; magnitude reads
            none.
        options: Options of `PruneConfig`: `method` (`wanda` if left out), `pattern`, `patterns`, `windows`,
            `seq_len`, `seed`, `activations`, `device`, `offload_dir`, `targets`, `ignore`, `mask_only`.

    Returns:
        The masks, and the weights that SparseGPT updated.

    Raises:
        UserError: For whatever can't be pruned or read.
    """
    config, updates, view = PruneConfig(**options), dict[str, Tensor](), frozen_view(lm)

    def text() -> CalibrationDataModule:
        if tokenizer is None or not corpora:
            raise UserError(
                f"{type(config.chosen).__name__} reads text: give the model's tokenizer and corpora"
            )
        return calibration_text(tokenizer, corpora, config.seq_len, config.seed)

    def keep(name: str, weight: Tensor) -> None:
        updates[name] = weight.cpu()

    layers = config.layers(type(lm).__name__, view)
    calibration = config.calibration(type(lm).__name__, view, text)
    base = open_base(base_of(view, layers.pruned), lm=view)
    return PruneResult(prune_model(base, view, layers, config.chosen, calibration, keep), updates)
