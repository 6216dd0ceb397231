"""The model card of an export: what it is, how sparse, how to load and how to check it."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from roi_lightning.masks import MASK_FILE, MaskSet
from roi_lightning.overlap import by_kind, kind_of


def model_card(masks: MaskSet, description: Mapping[str, Any], is_gguf: bool) -> str:
    """Write the card.

    Args:
        masks: The masks applied.
        description: The sidecar's content.
        is_gguf: Whether the base was read from a GGUF file.

    Returns:
        Markdown with a YAML front matter.
    """
    base = _base_name(masks)
    parts = [
        _front_matter(masks),
        f"# {base}, {masks.pattern} sparse",
        _summary(masks, description, base),
        _table(["kind of layer", "layers", "weights", "kept"], _kinds(masks)),
        _LOADING,
        _updates(masks) or _VERIFYING,
        _GGUF if is_gguf else "",
        _facts("Perplexity", description.get("perplexity")),
        _facts("How the mask was made", description.get("training")),
        _LIMITS,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_LOADING = """## Use

It is an ordinary checkpoint: zeros are stored like any other weight.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""

_VERIFYING = f"""## Check

```
python -m roi_lightning verify PATH --base BASE
```

tells whether every pruned weight is exactly zero, every group of inputs keeps the right number of weights,
every surviving weight is bit for bit the base model's, and no file has changed since the export. Without
`--base` it checks all that this directory can prove on its own. `{MASK_FILE}` holds one bit per weight; with
the base model, `python -m roi_lightning apply BASE {MASK_FILE} --out DIR` makes this directory again."""

_GGUF = """## Origin of the weights

The base model was read from a GGUF file. Its weights were dequantised and cast, so they differ from those of
the checkpoint that the GGUF file was made of; "bit for bit" refers to the dequantised weights."""

_LIMITS = """## Limits

The directory takes as much disk and memory as the base model. No common inference engine gains speed from
2:4 zeros it finds in a checkpoint; kernels that do need the weights converted at load time on a GPU that
supports them. Quantising may turn zeros into small values unless the scheme is symmetric. What the base
model's licence asks for applies here too."""


def _base_name(masks: MaskSet) -> str:
    return masks.base.spec if masks.base.revision else PurePath(masks.base.spec).name or masks.base.spec


def _front_matter(masks: MaskSet) -> str:
    lines = ["---"]
    if masks.base.revision:  # only hub models have one
        lines += [f"base_model: {masks.base.spec}", "base_model_relation: finetune"]
    lines += ["library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    tags = ["sparsity", "pruning", f'"{masks.pattern}"', "semi-structured", "roi-lightning"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---"])


def _summary(masks: MaskSet, description: Mapping[str, Any], base: str) -> str:
    n, m = masks.pattern.n, masks.pattern.m
    return (
        f"`{base}` with {masks.pattern} sparsity: of every {m} consecutive inputs of a masked linear layer, "
        f"{n} kept a weight and {m - n} have a weight of exactly zero. {_rest(masks)} "
        f"{masks.total - masks.kept:,} of {description['parameters']:,} parameters are zeros of the mask, "
        f"{description['zero_fraction']:.1%} of the whole model: embeddings, norms, biases and the output "
        "head stay dense. Made with roi_lightning "
        f"{description['package_version']}."
    )


def _rest(masks: MaskSet) -> str:
    if not masks.updated:
        return "Nothing else was changed."
    return f"The kept weights of {len(masks.updated)} layers were adjusted to make up for the loss."


def _updates(masks: MaskSet) -> str:
    if not masks.updated:
        return ""
    return f"""## Check

```
python -m roi_lightning verify PATH --base BASE
```

tells whether every pruned weight is exactly zero, every group of inputs keeps the right number of weights,
every tensor that was not pruned is bit for bit the base model's, the updated ones are as they were written, and
no file has changed since. `{MASK_FILE}` holds one bit per weight; it can't be applied to the base model, whose
weights are not the updated ones."""


def _kinds(masks: MaskSet) -> list[list[str]]:
    layers = by_kind(dict.fromkeys(masks.layers, 1))
    total = by_kind({name: layer.total for name, layer in masks.layers.items()})
    kept = by_kind({name: layer.kept for name, layer in masks.layers.items()})
    kinds = dict.fromkeys(kind_of(name) for name in masks.layers)
    return [[f"`{k}`", str(layers[k]), f"{total[k]:,}", f"{kept[k] / total[k]:.1%}"] for k in kinds]


def _facts(title: str, facts: Mapping[str, Any] | None) -> str:
    rows = [
        [str(key), f"{value:.4g}" if isinstance(value, float) else str(value)]
        for key, value in (facts or {}).items()
    ]
    return f"## {title}\n\n{_table(['what', 'value'], rows)}" if rows else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
