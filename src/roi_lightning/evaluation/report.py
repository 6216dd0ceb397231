"""What `evaluate` says besides numbers: how they were measured, in its JSON and in the sentence below its tables."""

import hashlib
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Any

from roi_lightning.evaluation.models import EvaluatedModel
from roi_lightning.evaluation.results_table import average
from roi_lightning.evaluation.run import Evaluation
from roi_lightning.evaluation.tasks import PROTOCOL_2048, EvalConfig


def as_json(
    evaluation: Evaluation,
    config: EvalConfig,
    dense: str | None,
    models: Sequence[EvaluatedModel] = (),
    **settings: str,
) -> dict[str, Any]:
    """The results and how they were measured; numbers that JSON does not have are spelled ("inf", "nan").

    Args:
        evaluation: From `evaluate_models`.
        config: What was measured.
        dense: The model that the others are compared with.
        models: The models.
        settings: How they were run.
    """
    kinds = {task.kind for task in evaluation.tasks}
    bos = {model.name: model.bos for model in models}
    word_length = {model.name: model.word_length for model in models}
    described = {
        "tasks": [task.name for task in evaluation.tasks],
        "limit": config.first,
        "num_fewshot": config.num_fewshot,
        "apply_chat_template": config.apply_chat_template,
        "chat_template_sha256": {model.name: _template(model) for model in models}
        if config.apply_chat_template
        else None,
        "system_instruction": config.system_instruction,
        "harness": evaluation.protocol or None,
        "seq_len": config.seq_len,
        "bos": bos if "windows" in kinds else None,
        "word_length": word_length if "documents" in kinds else None,
        "batch_size": config.batch_size,
        **settings,
        "text": None if config.text is None else str(config.text),
        "task_data": None if config.task_data is None else str(config.task_data),
        "lm_eval": importlib.metadata.version("lm_eval") if evaluation.protocol else None,
        "roi_lightning": importlib.metadata.version("roi-lightning"),
        "dense": dense,
    }
    content: dict[str, Any] = _spelled({"models": with_averages(evaluation), "settings": described})
    return content


def _template(model: EvaluatedModel) -> str:
    """A tokenizer may hold several by name."""
    return hashlib.sha256(str(model.tokenizer.chat_template).encode()).hexdigest()


def caption(
    evaluation: Evaluation, config: EvalConfig, dense: str | None, models: Sequence[EvaluatedModel] = ()
) -> str:
    """How to read the tables."""
    names = {task.name for task in evaluation.tasks}
    kinds = {task.kind for task in evaluation.tasks}
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
    said += _asked(evaluation, config)
    shown = [metric for task in evaluation.tasks for metric in task.shown]
    if dense is not None and (kinds & {"windows", "documents"} or any("perplexity" in x for x in shown)):
        said.append(f"×: ratio to {dense}")
    if dense is not None and kinds & {"questions", "harness"}:
        scale = ", of what is in % in points" if "harness" in kinds else " in points"
        said.append(f"+/−: difference to {dense}{scale}")
    if kinds & {"questions", "harness"}:
        said.append("±: standard error")
    said.append("W/U: kept weights updated")
    if config.first is not None:
        part = f"{config.first}" if config.first >= 1 else f"{config.first:.4g} of the"
        said.append(f"only the first {part} windows, documents and questions")
    return "; ".join(said) + "."


def _asked(evaluation: Evaluation, config: EvalConfig) -> list[str]:
    """How the harness' questions were put, where that is not the plainest way."""
    by_count: dict[int, list[str]] = {}
    for name, how in evaluation.protocol.items():
        by_count.setdefault(how["num_fewshot"], []).append(name)
    counted = [f"{count} ({_some(names)})" for count, names in by_count.items()]
    said = [f"examples per question: {', '.join(counted)}"] if set(by_count) - {0} else []
    said += ["asked as a chat by the model's template"] if config.apply_chat_template else []
    return said + ([f"system: {config.system_instruction!r}"] if config.system_instruction else [])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _lengths(models: Sequence[EvaluatedModel]) -> str:
    """One length for all models, or each with its own."""
    lengths = {model.name: f"{model.word_length:,}" for model in models}
    if len(set(lengths.values())) == 1:
        return lengths.popitem()[1]
    return ", ".join(f"{length} ({name})" for name, length in lengths.items())


def with_averages(evaluation: Evaluation) -> dict[str, Any]:
    """The results with the mean accuracy of every model that has several of the zero-shot tasks' own."""
    questions = [task.name for task in evaluation.tasks if task.kind == "questions"]
    models = {name: dict(metrics) for name, metrics in evaluation.results.items()}
    if len(questions) > 1:
        for metrics in models.values():
            metrics["average"] = {"acc": average(metrics, questions, "acc")}
    return models


def _spelled(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become text."""
    if isinstance(value, Mapping):
        return {key: _spelled(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
