"""A learner and its data on a model and a tokenizer that are in memory already."""

from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.models.source import ModelSource


class LearnerOnModel(RoILightningModule):
    """RoI on a model in memory.

    Args:
        lm: From `frozen_view`.
        source: Where its weights are stored.
        options: As in `RoILightningModule`.
    """

    def __init__(self, lm: PreTrainedModel, source: ModelSource, **options: Any) -> None:
        super().__init__(source.spec, **options)
        self.source, self._given = source, lm

    @override
    def load_lm(self) -> PreTrainedModel:
        return self._given


class TextForTokenizer(CalibrationDataModule):
    """Calibration text in the tokens of a tokenizer in memory; nothing is held out of it.

    Args:
        tokenizer: The model's own.
        corpora: As in `CalibrationDataModule`.
        options: Likewise.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, corpora: Any, **options: Any) -> None:
        super().__init__(tokenizer.name_or_path, corpora=corpora, val_corpora=corpora, **options)
        self._given = tokenizer

    @override
    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._given
