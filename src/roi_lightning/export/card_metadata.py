"""What a model card says for the hub: its front matter, what the publisher knows, names without local folders."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from huggingface_hub import EvalResult, ModelCardData

from roi_lightning.masks.mask_set import MaskSet

_SUFFIXES: Final = {
    *(".txt", ".json", ".jsonl", ".parquet", ".gz", ".zst", ".xz", ".bz2"),
    *(".gguf", ".safetensors", ".yaml", ".ckpt"),
}
_SECRET: Final = r"(?:\b|[._-])(?:token|key|secret|password)"
_HIDDEN: Final = "REDACTED"
_WORD: Final = re.compile(r"[^\s'\"{}\[\]()=,]+")


@dataclass(frozen=True)
class MeasuredQuality:
    """What `evaluate --json` wrote of a model.

    Attributes:
        metrics: Of the model, by task, or by task and metric (`arc_easy.acc`).
        dense: Those of the model it is compared with; empty without one.
        settings: Of the evaluation.
    """

    metrics: Mapping[str, float | str]
    dense: Mapping[str, float | str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Publication:
    """What only the person who publishes knows, or has looked up.

    Attributes:
        name: The repository, `owner/name`.
        licence: The front matter's `license`, `license_name` and `license_link`.
        base: The base model's hub id; None if it has none.
        languages: Codes.
        datasets: Hub ids of the text that the mask was made with.
        measured: How good the model is.
        config: The configuration of the run, YAML.
    """

    name: str
    licence: Mapping[str, str]
    base: str | None = None
    languages: Sequence[str] = field(default_factory=tuple)
    datasets: Sequence[str] = field(default_factory=tuple)
    measured: MeasuredQuality | None = None
    config: str | None = None


def front_matter(masks: MaskSet, publication: Publication | None) -> str:
    """YAML between two lines of dashes.

    Args:
        masks: The masks applied.
        publication: What is known beside them; None for a directory that has no name yet.
    """
    more = {} if publication is None else _published(publication)
    base = hub_id(masks, publication)
    if base is not None:
        more |= {"base_model": base, "base_model_relation": "finetune"}
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[
            "sparsity",
            "pruning",
            *_pattern_tags(masks),
            "semi-structured",
            "n-m-sparsity",
            "roi-lightning",
        ],
        **more,
    )
    return f"---\n{data.to_yaml()}\n---"


def _pattern_tags(masks: MaskSet) -> list[str]:
    return [*map(str, masks.pattern.distinct), *(["mixed-patterns"] if masks.is_mixed else [])]


def hub_id(masks: MaskSet, publication: Publication | None) -> str | None:
    """The base model's name on the hub, if it is known to have one."""
    if publication is not None and publication.base is not None:
        return publication.base
    return masks.base.spec if masks.base.revision else None  # only hub models have one


def _published(publication: Publication) -> dict[str, Any]:
    fields: dict[str, Any] = {
        **publication.licence,
        "language": list(publication.languages) or None,
        "datasets": list(publication.datasets) or None,
    }
    if publication.measured is not None:
        fields |= {
            "model_name": PurePath(publication.name).name,
            "eval_results": _results(publication.measured),
        }
    return fields


def _results(measured: MeasuredQuality) -> list[EvalResult]:
    """Perplexities and accuracies, without what goes with them (standard errors, counts, averages)."""
    results = []
    for name, value in measured.metrics.items():
        task, _, metric = name.partition(".")
        if metric in ("", "acc", "acc_norm") and task != "average":
            kind, title = _dataset(task, measured.settings["text"])
            results.append(
                EvalResult("text-generation", kind, title, metric or "perplexity", value, metric_name=name)
            )
    return results


def _dataset(task: str, text: str | None) -> tuple[str, str]:
    """Type and name of what a task is measured on."""
    if task.startswith("token_perplexity") and text is not None:
        return "text", text
    return ("wikitext", "WikiText-2") if "perplexity" in task else (task, task)


def public_name(text: str) -> str:
    """The last part of a path, or of each in a list with commas; hub ids and all that is no path stay.

    `/home/me/texts/*.txt, owner/name` becomes `*.txt, owner/name`, `gguf:../m.gguf` becomes `m.gguf`.
    """
    parts = text.split(", ")
    return ", ".join(PurePath(x).name if _is_path(x) else _WORD.sub(_public_word, x) for x in parts)


def public_values(value: Any, name: str = "") -> Any:
    """Lists and mappings with `public_name` of every text in them, without secrets; `name` is its key."""
    if isinstance(value, dict):
        return {key: public_values(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [public_values(inner, name) for inner in value]
    return without_secrets(name, public_name(value)) if isinstance(value, str) else value


def without_secrets(name: str, text: str) -> str:
    """A text without the passwords and tokens in it.

    Args:
        name: The option or the key that the text is the value of.
        text: May hold options or keys with values itself.
    """
    if re.search(f"{_SECRET}$", name):
        return _HIDDEN
    named = re.sub(rf"""({_SECRET}["']?\s*[=:]\s*)[^\s,}}]+""", rf"\1{_HIDDEN}", text)
    return re.sub(r"\bhf_\w{20,}", _HIDDEN, named)


def _public_word(match: re.Match[str]) -> str:
    word = match[0]
    return PurePath(word).name if _is_path(word) else word


def _is_path(text: str) -> bool:
    if "/" not in text or "://" in text or any(mark in text for mark in "{}\n"):
        return False
    marked = text.startswith(("/", "~", ".", "gguf:")) or "*" in text
    return marked or PurePath(text).suffix in _SUFFIXES or os.path.exists(text)  # noqa: PTH110 - no path at all is no error here
