"""What `evaluate` says besides numbers: how they were measured, in its JSON and in the sentence below its tables."""

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Any

from roi_lightning.evaluation.models import EvaluatedModel
from roi_lightning.evaluation.results_table import average
from roi_lightning.evaluation.tasks import PROTOCOL_2048, EvalConfig


def as_json(
    results: Mapping[str, Mapping[str, Any]],
    config: EvalConfig,
    dense: str | None,
    models: Sequence[EvaluatedModel] = (),
    **settings: str,
) -> dict[str, Any]:
    """The results and how they were measured; numbers that JSON does not have are spelled ("inf", "nan").

    Args:
        results: By model and task (`evaluate_models`).
        config: What was measured.
        dense: The model that the others are compared with.
        models: The models.
        settings: How they were run.
    """
    bos = {model.name: model.bos for model in models}
    word_length = {model.name: model.word_length for model in models}
    described = {
        "tasks": [task.name for task in config.chosen],
        "limit": config.limit,
        "seq_len": config.seq_len,
        "bos": bos if "windows" in config.kinds else None,
        "word_length": word_length if "documents" in config.kinds else None,
        "batch_size": config.batch_size,
        **settings,
        "text": None if config.text is None else str(config.text),
        "task_data": None if config.task_data is None else str(config.task_data),
        "lm_eval": importlib.metadata.version("lm_eval") if config.harness_tasks else None,
        "roi_lightning": importlib.metadata.version("roi-lightning"),
        "dense": dense,
    }
    content: dict[str, Any] = _spelled({"models": with_averages(results, config), "settings": described})
    return content


def caption(config: EvalConfig, dense: str | None, models: Sequence[EvaluatedModel] = ()) -> str:
    """How to read the tables."""
    names = {task.name for task in config.chosen}
    source = config.text or "the WikiText-2 test text"
    begun = ", ".join(model.name for model in models if model.bos is not None)
    said = []
    if "token_perplexity" in names:
        said.append(f"token PPL: {source} in windows of {config.seq_len} tokens, the tail kept")
        said += [f"each begins with the BOS of {begun}, which is never predicted"] if begun else []
    if PROTOCOL_2048 in names:
        said.append(
            f"2048 PPL: the rows of {source} in windows of 2048, the tail dropped, as Wanda and SparseGPT do"
        )
        said += [f"only the first begins with the BOS of {begun}"] if begun else []
    if "word_perplexity" in names:
        said.append(f"word PPL: {_lengths(models)} tokens at once")
    if dense is not None and config.kinds != {"questions"}:
        said.append(f"×: ratio to {dense}")
    if dense is not None and "questions" in config.kinds:
        said.append(f"+/−: difference to {dense} in points")
    if "questions" in config.kinds:
        said.append("±: standard error")
    said.append("W/U: kept weights updated")
    if config.limit is not None:
        said.append(f"only the first {config.limit} windows, documents and questions")
    return "; ".join(said) + "."


def _lengths(models: Sequence[EvaluatedModel]) -> str:
    """One length for all models, or each with its own."""
    lengths = {model.name: f"{model.word_length:,}" for model in models}
    if len(set(lengths.values())) == 1:
        return lengths.popitem()[1]
    return ", ".join(f"{length} ({name})" for name, length in lengths.items())


def with_averages(results: Mapping[str, Mapping[str, Any]], config: EvalConfig) -> dict[str, Any]:
    """The results with the mean accuracy of every model that has several."""
    questions = [task.name for task in config.chosen if task.kind == "questions"]
    models = {name: dict(metrics) for name, metrics in results.items()}
    if len(questions) > 1:
        for metrics in models.values():
            metrics["average"] = {"acc": average(metrics, questions, "acc")}
    return models


def _spelled(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become text."""
    if isinstance(value, Mapping):
        return {key: _spelled(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
