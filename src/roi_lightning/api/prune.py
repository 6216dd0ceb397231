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
from roi_lightning.models.config import max_positions
from roi_lightning.models.fingerprint import base_of
from roi_lightning.models.freezing import frozen_view
from roi_lightning.models.layers import checked_layers
from roi_lightning.oneshot import CalibratedMethod, prune_model
from roi_lightning.oneshot.config import PruneConfig


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
        tokenizer: Its own; magnitude needs none.
        corpora: Calibration text: files, globs, hub ids, `python-docs`, `self`, or `Corpus` objects; magnitude reads
            none.
        options: Of `PruneConfig`: `method` (`wanda` if left out), `pattern`, `patterns`, `windows`,
            `seq_len`, `seed`, `activations`, `device`, `offload_dir`, `targets`, `ignore`.

    Returns:
        The masks, and the weights that SparseGPT updated.

    Raises:
        UserError: For whatever can't be pruned or read.
    """
    config, updates = PruneConfig(**options), dict[str, Tensor]()
    method, pattern = config.chosen, config.layer_pattern
    view = frozen_view(lm)
    chosen = checked_layers(type(lm).__name__, view, pattern, config.targets, config.ignore)
    calibration = None
    if isinstance(method, CalibratedMethod):
        if tokenizer is None or not corpora:
            raise UserError(f"{type(method).__name__} reads text: give the model's tokenizer and corpora")
        # None of the text is held out.
        text: dict[str, Any] = {"corpora": corpora, "val_corpora": corpora}
        data = CalibrationDataModule(tokenizer.name_or_path, **text, seq_len=config.seq_len, seed=config.seed)
        data.use_tokenizer(tokenizer)
        data.use_model(view)
        calibration = config.calibration(data, max_positions(view.config))
    elif corpora:
        raise UserError(f"{type(method).__name__} reads no text; leave out corpora")
    base = open_base(base_of(view, chosen.pruned), lm=view)

    def keep(name: str, weight: Tensor) -> None:
        updates[name] = weight.cpu()

    return PruneResult(prune_model(base, view, chosen, method, calibration, keep), updates)
