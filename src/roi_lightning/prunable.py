"""Name the linear layers of a language model that a mask may prune."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roi_lightning.errors import UserError
from roi_lightning.language_model import load_config, meta_language_model
from roi_lightning.pattern import NMPattern
from roi_lightning.sources import ModelSource, StoredTensors


def prunable_layers(
    lm: PreTrainedModel,
    targets: Sequence[str] = ("*",),
    ignore: Sequence[str] = (),
) -> dict[str, nn.Linear | Conv1D]:
    """Every linear layer inside the decoder blocks, by name, in the model's order.

    Embeddings and `lm_head` lie outside the blocks and are never among them.

    Args:
        lm: Any causal language model whose blocks are a `ModuleList` of the configured length.
        targets: Glob patterns of layers to prune, matched against the whole dotted name or its end
            (`q_proj`, `mlp.*`, `model.layers.0.*`).
        ignore: Patterns of layers to leave dense.

    Raises:
        UserError: If no blocks are found, a pattern matches nothing, or no layer remains.
    """
    candidates = _block_linears(lm)
    for label, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in candidates):
                raise UserError(
                    f"{label}: {pattern!r} matches none of the {len(candidates)} linear layers; "
                    f"they are named like {next(iter(candidates))!r}"
                )
    chosen = {
        name: layer
        for name, layer in candidates.items()
        if _any_match(name, targets) and not _any_match(name, ignore)
    }
    if not chosen:
        raise UserError(f"ignore: {list(ignore)} leaves no layer to prune; remove a pattern")
    return chosen


def _block_linears(lm: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    blocks = decoder_blocks(lm)
    found = {
        name: module
        for name, module in lm.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name.startswith(f"{blocks}.")
    }
    if not found:
        raise UserError(f"{type(lm).__name__} has no linear layers inside {blocks!r}; it can't be pruned")
    return found


def decoder_blocks(lm: PreTrainedModel) -> str:
    """The dotted name of the list of decoder blocks.

    Raises:
        UserError: If the model has no list as long as its configuration says.
    """
    depth = lm.config.get_text_config().num_hidden_layers
    for name, module in lm.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return str(name)
    raise UserError(
        f"{type(lm).__name__} has no list of {depth} decoder blocks; this layout is not supported"
    )


def _any_match(name: str, patterns: Iterable[str]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_pattern(layers: dict[str, nn.Linear | Conv1D], pattern: NMPattern) -> None:
    """Refuse a pattern that does not divide some layer's input.

    Raises:
        UserError: Naming the first such layer.
    """
    for name, layer in layers.items():
        pattern.check(layer.weight.shape[input_dim(layer)], name)


def input_dim(layer: nn.Module) -> int:
    """The input dimension of the layer's weight: 0 for GPT-2's `Conv1D` ([in, out]), else 1 ([out, in]).

    A layer that stands in for one of these says it by its own attribute `dim`.
    """
    return 0 if isinstance(layer, Conv1D) or getattr(layer, "dim", 1) == 0 else 1


def stored_names(lm: PreTrainedModel, names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Map parameter names of the loaded model to the names of the same tensors on disk.

    Some checkpoints (GPT-2's) leave out the prefix of the inner model, others keep it.

    Raises:
        UserError: If a parameter is on disk under no known name.
    """
    known, prefix = set(stored), f"{lm.base_model_prefix}."
    mapping = {}
    for name in names:
        options = (name, name.removeprefix(prefix), prefix + name)
        match = next((option for option in options if option in known), None)
        if match is None:
            raise UserError(f"parameter {name!r} is not among the model's {len(known)} stored tensors")
        mapping[name] = match
    return mapping


def stored_weights(source: ModelSource, lm: PreTrainedModel, layers: Iterable[str]) -> dict[str, str]:
    """Layer name → the name of its weight as stored on disk.

    Raises:
        UserError: If a weight is on disk under no known name.
    """
    names = {layer: f"{layer}.weight" for layer in layers}
    if source.kind == "gguf":
        return names
    stored = stored_names(lm, names.values(), StoredTensors(source.directory))
    return {layer: stored[name] for layer, name in names.items()}


def check_model(
    source: ModelSource,
    pattern: NMPattern,
    targets: Sequence[str] = ("*",),
    ignore: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> None:
    """Check names and shapes on the meta device, before text or weights are read.

    Raises:
        UserError: For an unreadable model, an encoder, patterns that match nothing, or a layer M does not divide.
    """
    lm = meta_language_model(load_config(source, trust_remote_code), trust_remote_code)
    layers = prunable_layers(lm, targets, ignore)
    check_pattern(layers, pattern)
    _check_causal(source, lm, layers)


def _check_causal(source: ModelSource, lm: PreTrainedModel, layers: Iterable[str]) -> None:
    """Refuse an encoder, which transformers would run as if it were a decoder that sees what it is to predict."""
    owners = [lm.get_submodule(name.rpartition(".")[0]) for name in layers]
    causal = {owner.is_causal for owner in owners if hasattr(owner, "is_causal")}
    if causal == {False}:
        raise UserError(
            f"model {source.spec!r} is an encoder ({type(lm).__name__} attends to the text that follows); "
            "only causal language models can be pruned"
        )
