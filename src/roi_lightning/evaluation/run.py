"""Measure several models on several tasks: everything checked first, then one model in memory at a time."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data.packing import as_batch
from roi_lightning.errors import UserError
from roi_lightning.evaluation.config import PERPLEXITIES, PROTOCOL_2048, WORDS, ZERO_SHOT, EvalConfig
from roi_lightning.evaluation.evaluated_models import EvaluatedModel
from roi_lightning.evaluation.harness import figures_of, open_tasks, run_tasks
from roi_lightning.evaluation.perplexity import Cut, EvalChats, EvalText, read_text, token_perplexity
from roi_lightning.models.config import check_embedded
from roi_lightning.utils.progress import progress

# A perplexity, or figures by name.
Metrics = float | dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        models: In the order of the rows.
        config: How it was measured.
        results: By model and task a perplexity, or figures by name, accuracies as fractions of 1.
        dense: The name of the model that the others are compared with; None for no comparison.
        harness: What lm-evaluation-harness says of its tasks (`lm_eval.evaluate`); empty without any.
    """

    models: Sequence[EvaluatedModel]
    config: EvalConfig
    results: dict[str, dict[str, Metrics]]
    dense: str | None = None
    harness: dict[str, Any] = field(default_factory=dict)


def evaluate_models(
    models: Sequence[EvaluatedModel],
    config: EvalConfig,
    load: Callable[[EvaluatedModel], PreTrainedModel],
    dense: str | None = None,
) -> Evaluation:
    """All metrics of all models.

    Args:
        models: From `resolve_evaluated`.
        config: What to measure.
        load: Gives a model on its device, in eval mode.
        dense: The name of the model that the others are compared with.

    Raises:
        UserError: If the text or a task's data can't be had, or a model is too short for a window or has no chat
            template where one is needed, all before a model is loaded; or if a model can't be read or asked.
    """
    prepared = _prepare(models, config)
    results, harness = {}, dict[str, Any]()
    for model in models:
        lm = load(model)
        results[model.name], harness = _measure(model, lm, prepared, config)
        del lm
        gc.collect()  # a model's modules refer to each other in circles
        torch.cuda.empty_cache()
    return Evaluation(models, config, results, dense, harness)


class _Prepared(NamedTuple):
    """Everything that is measured on.

    Attributes:
        windows: By model and token perplexity, the text as the model takes it (`as_batch`).
        documents: Of the word perplexity, as `open_tasks` gives them; empty for none.
        tasks: The other tasks of the harness, likewise.
    """

    windows: dict[str, dict[str, list[dict[str, Tensor]]]]
    documents: dict[str, Any]
    tasks: dict[str, Any]


def _prepare(models: Sequence[EvaluatedModel], config: EvalConfig) -> _Prepared:
    names = [name for name in config.names if name in PERPLEXITIES and name != WORDS]
    cuts = {model.name: {name: _cut(config, name, model) for name in names} for model in models}
    text = read_text(config.corpus) if names else EvalText("", "")
    windows = {
        model.name: {name: _batches(config, model, text, cut) for name, cut in cuts[model.name].items()}
        for model in models
    }
    for model in models:
        if config.apply_chat_template and getattr(model.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"model {model.name!r}: its tokenizer has no chat template; leave out --apply_chat_template"
            )
        if (config.harness_names or WORDS in config.names) and model.tokenizer.eos_token is None:
            raise UserError(
                f"model {model.name!r}: its tokenizer has no EOS, which the harness puts before texts and pads with; "
                "name one in its tokenizer_config.json (eos_token), or leave the harness' tasks out"
            )
    documents = open_tasks(["wikitext"] if WORDS in config.names else [], config.task_data, None)
    tasks = open_tasks(config.harness_names, config.task_data, config.num_fewshot)
    for model in models:
        model.check_weights()
    return _Prepared(windows, documents, tasks)


def _cut(config: EvalConfig, name: str, model: EvaluatedModel) -> Cut:
    """How a text becomes windows; each begins with the model's BOS, in Wanda's protocol only the first."""
    cut = Cut(config.seq_len, limit=config.first, bos=model.bos_id)
    if name == PROTOCOL_2048:
        cut = Cut(2048, keep_tail=False, limit=config.first)
    if cut.length > (model.max_positions or cut.length):
        raise UserError(
            f"model {model.name!r} reads at most {model.max_positions} tokens and the windows of {name} have "
            f"{cut.length}; lower --seq_len, or leave out {PROTOCOL_2048}"
        )
    return cut


def _batches(
    config: EvalConfig, model: EvaluatedModel, text: EvalText | EvalChats, cut: Cut
) -> list[dict[str, Tensor]]:
    if isinstance(text, EvalChats):
        ids = text.encode(model.tokenizer)
    else:
        ids = cut.encode(model.tokenizer, text.whole if cut.keep_tail else text.rows)
    batches = [batch for batch in cut.batches(ids, config.batch_size) if (batch[:, 1:] >= 0).any()]
    if not batches:
        raise UserError(f"the first windows of {config.text} hold no answer; raise --limit")
    for batch in batches:
        check_embedded(batch, model.tokenizer, model.config)
    return [as_batch(batch) for batch in batches]


def _measure(
    model: EvaluatedModel, lm: PreTrainedModel, prepared: _Prepared, config: EvalConfig
) -> tuple[dict[str, Metrics], dict[str, Any]]:
    """The metrics of a model by task, and what the harness says of its tasks."""
    metrics: dict[str, Metrics] = {}
    harness: dict[str, Any] = {}
    label = model.name if len(model.name) <= 32 else f"…{model.name[-31:]}"
    for name, batches in prepared.windows[model.name].items():
        ids = progress([batch["input_ids"] for batch in batches], f"{label}: {name}")
        metrics[name] = token_perplexity(lm, ids, [batch.get("labels") for batch in batches])
    if prepared.documents:
        metrics[WORDS] = _word_perplexity(model, lm, prepared.documents, config, f"{label}: {WORDS}")
    if prepared.tasks:
        harness = run_tasks(prepared.tasks, lm, model.tokenizer, config, description=f"{label}: tasks")
        figures = figures_of(harness)
        metrics |= figures
        accuracies = [figures[name]["acc"] for name in ZERO_SHOT if name in figures]
        if len(accuracies) > 1:
            metrics["average"] = {"acc": fmean(accuracies)}
    return metrics, harness


def _word_perplexity(
    model: EvaluatedModel, lm: PreTrainedModel, documents: dict[str, Any], config: EvalConfig, label: str
) -> float:
    try:
        results = run_tasks(
            documents, lm, model.tokenizer, config, max_length=model.word_length, description=label
        )
    except OverflowError:  # the harness takes exp of whatever a ruined model needs per word
        return math.inf
    return figures_of(results)["wikitext"]["word_perplexity"]
