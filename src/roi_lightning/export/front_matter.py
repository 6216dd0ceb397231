"""The front matter of a model card: what the hub knows a model by."""

from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from roi_lightning.export.publication import Measured, Publication
from roi_lightning.masks import MaskSet


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
        tags=["sparsity", "pruning", str(masks.pattern), "semi-structured", "n-m-sparsity", "roi-lightning"],
        **more,
    )
    return f"---\n{data.to_yaml()}\n---"


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


def _results(measured: Measured) -> list[EvalResult]:
    """Perplexities and accuracies, without what goes with them (standard errors, counts, averages)."""
    results = []
    for name, value in measured.figures.items():
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
