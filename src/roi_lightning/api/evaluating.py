"""Measure a model in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.attention import attention_put_back
from roi_lightning.evaluation.harness import Figures
from roi_lightning.evaluation.report import with_averages
from roi_lightning.evaluation.run import evaluate_models
from roi_lightning.evaluation.settings import Settings
from roi_lightning.evaluation.subjects import Subject
from roi_lightning.evaluation.tasks import choose_tasks
from roi_lightning.language_model import DType, frozen_view
from roi_lightning.sources import ModelSource


@dataclass(frozen=True, eq=False)
class _InMemory(Subject):
    """A model that is loaded already."""

    lm: PreTrainedModel

    @override
    def load(self, dtype: DType, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
        return self.lm


def evaluate(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path | str | None = None,
    *,
    tasks: Sequence[str] = ("token_perplexity",),
    task_data: Path | str | None = None,
    seq_len: int = 1024,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, Figures]:
    """What the command `evaluate` writes of one model; the model stays as it is.

    Args:
        lm: Any causal language model, all of it on one device, where it is measured.
        tokenizer: Its own.
        text: A file for the token perplexities; None for WikiText-2 from the hub.
        tasks: What to measure, by the names of the command.
        task_data: A folder with `<task>.jsonl` for the harness tasks; None for the hub.
        seq_len: Tokens of a window of `token_perplexity`.
        limit: The first so many windows, documents and questions; None for all.
        batch_size: Sequences of a forward pass.

    Returns:
        By task a perplexity, which may be infinite, or accuracies as fractions of 1.

    Raises:
        UserError: For whatever can't be measured.
    """
    settings = Settings(
        tasks=choose_tasks(",".join(tasks)),
        text=None if text is None else Path(text),
        task_data=None if task_data is None else Path(task_data),
        seq_len=seq_len,
        limit=limit,
        batch_size=batch_size,
        device=lm.device,
    )
    settings.check()
    with attention_put_back():
        view = frozen_view(lm).eval()
        source = ModelSource(type(lm).__name__, "memory")
        subject = _InMemory(source.spec, source, None, None, view.config, tokenizer, view)
        figures: dict[str, Figures] = with_averages(evaluate_models([subject], settings), settings)[
            source.spec
        ]
        return figures
