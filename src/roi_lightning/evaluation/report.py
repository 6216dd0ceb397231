"""What `evaluate` writes: JSON, Markdown, and the sentence under the tables that says how it was measured."""

import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roi_lightning.atomic import written_aside
from roi_lightning.evaluation.settings import Settings
from roi_lightning.evaluation.sheet import average
from roi_lightning.evaluation.subjects import Subject
from roi_lightning.evaluation.tasks import PROTOCOL_2048, harness_tasks


def write(out: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        UserError: If the file system refuses.
    """
    with written_aside(out) as partial:
        partial.write_text(text, encoding="utf-8")


def to_json(
    results: Mapping[str, Mapping[str, Any]],
    settings: Settings,
    dense: str | None,
    subjects: Sequence[Subject] = (),
) -> str:
    """The results and how they were measured, as JSON; infinity is spelled "inf".

    Args:
        results: By model and task (`evaluate_models`).
        settings: How they came about.
        dense: The model that the others are compared with.
        subjects: The models.
    """
    described = _described(settings, dense, subjects)
    content = {"models": with_averages(results, settings), "settings": described}
    return json.dumps(_spelled(content), indent=2, allow_nan=False) + "\n"


def caption(settings: Settings, dense: str | None, subjects: Sequence[Subject] = ()) -> str:
    """How to read the tables."""
    names = {task.name for task in settings.tasks}
    source = settings.text or "the WikiText-2 test text"
    begun = ", ".join(subject.name for subject in subjects if subject.bos is not None)
    said = []
    if "token_perplexity" in names:
        said.append(f"token PPL: {source} in windows of {settings.seq_len} tokens, the tail kept")
        said += [f"each begins with the BOS of {begun}, which is never predicted"] if begun else []
    if PROTOCOL_2048 in names:
        said.append(
            f"2048 PPL: the rows of {source} in windows of 2048, the tail dropped, as Wanda and SparseGPT do"
        )
        said += [f"only the first begins with the BOS of {begun}"] if begun else []
    if "word_perplexity" in names:
        said.append(f"word PPL: {_lengths(subjects)} tokens at once")
    kinds = {task.kind for task in settings.tasks}
    if dense is not None and kinds != {"questions"}:
        said.append(f"×: ratio to {dense}")
    if dense is not None and "questions" in kinds:
        said.append(f"+/−: difference to {dense} in points")
    if "questions" in kinds:
        said.append("±: standard error")
    said.append("W/U: surviving weights updated")
    if settings.limit is not None:
        said.append(f"only the first {settings.limit} windows, documents and questions")
    return "; ".join(said) + "."


def _lengths(subjects: Sequence[Subject]) -> str:
    """One length for all models, or each with its own."""
    lengths = {subject.name: f"{subject.word_length:,}" for subject in subjects}
    if len(set(lengths.values())) == 1:
        return lengths.popitem()[1]
    return ", ".join(f"{length} ({name})" for name, length in lengths.items())


def _described(settings: Settings, dense: str | None, subjects: Sequence[Subject]) -> dict[str, Any]:
    uses_harness = bool(harness_tasks(settings.tasks))
    kinds = {task.kind for task in settings.tasks}
    bos = {subject.name: subject.bos for subject in subjects}
    word_length = {subject.name: subject.word_length for subject in subjects}
    return {
        "tasks": [task.name for task in settings.tasks],
        "limit": settings.limit,
        "seq_len": settings.seq_len,
        "bos": bos if "windows" in kinds else None,
        "word_length": word_length if "documents" in kinds else None,
        "batch_size": settings.batch_size,
        "dtype": settings.dtype,
        "device": str(settings.device),
        "text": None if settings.text is None else str(settings.text),
        "task_data": None if settings.task_data is None else str(settings.task_data),
        "lm_eval": importlib.metadata.version("lm_eval") if uses_harness else None,
        "roi_lightning": importlib.metadata.version("roi-lightning"),
        "dense": dense,
    }


def with_averages(results: Mapping[str, Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """The results with the mean accuracy of every model that has several."""
    questions = [task.name for task in settings.tasks if task.kind == "questions"]
    models = {name: dict(figures) for name, figures in results.items()}
    if len(questions) > 1:
        for figures in models.values():
            figures["average"] = {"acc": average(figures, questions, "acc")}
    return models


def _spelled(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become text."""
    if isinstance(value, Mapping):
        return {key: _spelled(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
