"""The model card of an export: what it is, how sparse, how to load and how to check it."""

from collections.abc import Mapping
from typing import Any, Final

from huggingface_hub import ModelCardData

from roi_lightning.export.sidecar import RECOVERED, WITH_WEIGHTS, public_name
from roi_lightning.masks.layer_patterns import LayerPatterns
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.masks.overlap import by_kind, kind_of
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.utils.tables import markdown_table


def model_card(masks: MaskSet, description: Mapping[str, Any]) -> str:
    """Write the card.

    Args:
        masks: The masks applied.
        description: The sidecar's content.

    Returns:
        Markdown with a YAML front matter.
    """
    hub_id = masks.base.spec if masks.base.revision else None  # only hub models have one
    base = hub_id or public_name(masks.base.spec)
    training, of_gguf = description.get("training", {}), description.get("dequantized", {})
    parts = [
        _front_matter(masks, hub_id),
        f"# {base}, {masks.pattern} sparse{' (mixed patterns)' if masks.is_mixed else ''}",
        _summary(masks, description, base),
        _kinds(masks),
        _LOADING,
        _facts("## Perplexity", description.get("perplexity")),
        _facts("## How the mask was made", training),
        _data(training),
        _check(masks, "BASE" if of_gguf else hub_id or "BASE"),
        _origin(of_gguf),
        _LIMITS,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(masks: MaskSet, hub_id: str | None) -> str:
    """YAML between two lines of dashes, for the hub."""
    patterns = [*map(str, masks.pattern.distinct), *(["mixed-patterns"] if masks.is_mixed else [])]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sparsity", "pruning", *patterns, "semi-structured", "n-m-sparsity", "roi-lightning"],
        base_model=hub_id,
        base_model_relation="finetune" if hub_id else None,
    )
    return f"---\n{data.to_yaml()}\n---"


_LOADING: Final = """## Use

It is an ordinary checkpoint: zeros are stored like any other weight.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
prompt = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))
```"""

_GGUF: Final = """## Origin of the weights

The base model was read from the GGUF file `{file}`, whose matrices are {blocks} in the blocks and {others}
elsewhere. They were dequantised and cast. So the weights, and the perplexity of the dense model, differ from those of
the checkpoint that the file was made of; "bit for bit" refers to the dequantised weights."""

_LIMITS: Final = """## Limits

The directory takes as much disk and memory as the base model. No common inference engine gains speed from
2:4 zeros it finds in a checkpoint; kernels that do need the weights converted at load time on a GPU that
supports them. Quantising may turn zeros into small values unless the scheme is symmetric. What the base
model's licence asks for applies here too."""

_UNCHANGED: Final = f"""tells whether every pruned weight is exactly zero, every group of inputs keeps the right
number of weights, every surviving weight is bit for bit the base model's, and no file has changed since the
export. Without `--base` it checks all that this directory can prove on its own. `{MASK_FILE}` holds one bit per
weight; with the base model, `roi-lightning apply BASE {MASK_FILE} --out DIR` makes these weights
again."""

_UPDATED: Final = f"""tells whether every pruned weight is exactly zero, every group of inputs keeps the right
number of weights, every tensor that was neither pruned nor updated is bit for bit the base model's, the updated
ones are as they were written, and no file has changed since. `{MASK_FILE}` holds one bit per weight; it can't be
applied to the base model, whose weights are not the updated ones."""


def _summary(masks: MaskSet, description: Mapping[str, Any], base: str) -> str:
    return (
        f"`{base}` with {_sparsity(masks)} {_rest(masks, description.get('training', {}))} "
        f"{masks.total - masks.kept:,} of {description['parameters']:,} parameters are zeros of the mask, "
        f"{description['zero_fraction']:.1%} of the whole model: embeddings, norms, biases and the output "
        "head stay dense. Made with roi_lightning "
        f"{description['package_version']}."
    )


def _sparsity(masks: MaskSet) -> str:
    if isinstance(masks.pattern, NMPattern):
        n, m = masks.pattern.n, masks.pattern.m
        return (
            f"{masks.pattern} sparsity: of every {m} consecutive inputs of a masked linear layer, "
            f"{n} kept a weight and {m - n} have a weight of exactly zero."
        )
    return (
        f"mixed patterns, {masks.pattern}: a linear layer at N:M kept N weights of every M consecutive inputs, the "
        f"others are exactly zero. {masks.amount} prunable weights are kept; compare it with models of the same "
        "patterns, or of as many kept weights."
    )


def _rest(masks: MaskSet, training: Mapping[str, Any]) -> str:
    if not masks.updated:
        return "Nothing else was changed."
    if training.get("method") == RECOVERED:
        return f"The kept weights of {len(masks.updated)} layers were trained on under the mask."
    if str(training.get("method")).endswith(WITH_WEIGHTS):
        return f"The weights of {len(masks.updated)} layers were trained along with the mask."
    return f"The kept weights of {len(masks.updated)} layers were adjusted to make up for the loss."


def _kinds(masks: MaskSet) -> str:
    """A table of the kinds of layer."""
    weights = {name: layer.total for name, layer in masks.layers.items()} | masks.dense
    kept = by_kind({name: layer.kept for name, layer in masks.layers.items()} | masks.dense)
    layers, total = by_kind(dict.fromkeys(weights, 1)), by_kind(weights)
    rows = [
        [f"`{k}`", str(layers[k]), f"{total[k]:,}", f"{kept[k] / total[k]:.1%}", *_patterns_of(masks, k)]
        for k in dict.fromkeys(map(kind_of, weights))
    ]
    more = ["patterns"] if masks.is_mixed else []
    return markdown_table(["kind of layer", "layers", "weights", "kept", *more], rows)


def _patterns_of(masks: MaskSet, kind: str) -> list[str]:
    """The patterns of a kind of layer, where not all layers have the same."""
    if not isinstance(masks.pattern, LayerPatterns):
        return []
    own = {name: pattern for name, pattern in masks.pattern.by_glob.items() if kind_of(name) == kind}
    return [str(LayerPatterns(own))]


def _data(training: Mapping[str, Any]) -> str:
    if "text" not in training:
        return ""
    amount = f", {training['tokens']:,} tokens" if "tokens" in training else ""
    return f"## Data\n\nThe mask was made on `{public_name(training['text'])}`{amount}."


def _check(masks: MaskSet, base: str) -> str:
    command = f"```\nroi-lightning verify PATH --base {base}\n```"
    claim = _UPDATED if masks.updated else _UNCHANGED.replace("BASE", base)
    return f"## Check\n\n{command}\n\n{claim}"


def _origin(of_gguf: Mapping[str, Any]) -> str:
    """Where dequantised weights come from."""
    if not of_gguf:
        return ""
    blocks, others = (
        ", ".join(f"{n} {kind}" for kind, n in of_gguf[part].items()) for part in ("blocks", "others")
    )
    return _GGUF.format(file=of_gguf["file"], blocks=blocks, others=others)


def _facts(title: str, facts: Mapping[str, Any] | None) -> str:
    # Text may hold stars and underscores.
    rows = [
        [str(key), f"{value:.4g}" if isinstance(value, float) else f"`{public_name(str(value))}`"]
        for key, value in (facts or {}).items()
    ]
    return f"{title}\n\n{markdown_table(['what', 'value'], rows, left=2)}" if rows else ""
