"""Measure a model in memory."""

from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.evaluation.evaluated_models import EvaluatedModel
from roi_lightning.evaluation.run import Metrics, evaluate_models
from roi_lightning.models.loading import frozen_view
from roi_lightning.models.source import ModelSource


def evaluate(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path | str | None = None,
    **options: Any,
) -> dict[str, Metrics]:
    """What the command `evaluate` writes of one model; the model stays as it is.

    Args:
        lm: Any causal language model, all of it on one device, where it is measured.
        tokenizer: The model's tokenizer.
        text: A file for the token perplexities, or a mapping as in `EvalConfig`; None for WikiText-2 from the hub.
        options: Options of `EvalConfig`: `tasks`, `task_data`, `num_fewshot`, `apply_chat_template`,
            `system_instruction`, `seq_len`, `limit`, `batch_size`.

    Returns:
        By task a perplexity, which may be infinite, or figures by name, accuracies as fractions of 1.

    Raises:
        UserError: For whatever can't be measured.
    """
    view = frozen_view(lm).eval()
    source = ModelSource(type(lm).__name__, "memory")
    model = EvaluatedModel(source.spec, source, None, None, view.config, tokenizer)
    config = EvalConfig(text=text, **options)
    return evaluate_models([model], config, lambda _: view).results[model.name]
