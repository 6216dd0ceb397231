"""Find the layers of a language model that can be pruned, and the names of their weights on disk.

What is pruned is a matrix, a parameter or an expert's part of one, wherever the model reads it. transformers renames
tensors while it loads them; its own rules say how.
"""

import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_patterns import LayerPatterns, Pattern, layer_patterns, matches
from roi_lightning.models.experts import is_router, stacked_experts
from roi_lightning.models.source import ModelSource
from roi_lightning.models.stored_tensors import StoredTensors


@dataclass(frozen=True)
class Layer:
    """A matrix of a model that can be pruned: a parameter, or an expert's part of one.

    Attributes:
        parameter: The dotted name of the parameter.
        shape: (out, in).
        transposed: Whether the parameter is [in, out], as GPT-2's `Conv1D` has it.
        expert: Its place in a stack [experts, rows, in]; None for a parameter of its own.
        first_row: Where it begins among the rows of its expert.
    """

    parameter: str
    shape: tuple[int, int]
    transposed: bool = False
    expert: int | None = None
    first_row: int = 0

    @property
    def numel(self) -> int:
        """How many weights it has."""
        return self.shape[0] * self.shape[1]

    @property
    def stored_shape(self) -> tuple[int, int]:
        """The shape of the tensor on disk."""
        return (self.shape[1], self.shape[0]) if self.transposed else self.shape

    @property
    def module(self) -> str:
        """The dotted name of the module whose parameter it is."""
        return self.parameter.rpartition(".")[0]

    def view(self, tensor: Tensor) -> Tensor:
        """Its part of the parameter, or of a tensor like that, as a view [out, in]."""
        if self.expert is not None:
            return tensor[self.expert, self.first_row : self.first_row + self.shape[0]]
        return tensor.T if self.transposed else tensor

    def of(self, lm: nn.Module) -> Tensor:
        """The weight in a model, without gradient."""
        return self.view(lm.get_parameter(self.parameter).detach())


def prunable_layers(
    lm: PreTrainedModel,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
) -> dict[str, Layer]:
    """Every linear layer inside the decoder blocks, by name, in the model's order.

    Embeddings and `lm_head` are outside the blocks and never among them; routers of experts are left out.
    Matrices in the blocks that are no linear layer stay dense: a warning lists them, once a process.

    Args:
        lm: Any causal language model whose blocks are a `ModuleList` of the configured length.
        targets: Glob patterns of layers to prune, matched against the whole dotted name or its end
            (`q_proj`, `mlp.*`, `model.layers.0.*`).
        ignore: Patterns of layers to leave dense.

    Raises:
        UserError: If no blocks are found, a pattern matches nothing, or no layer remains.
    """
    candidates = block_layers(lm)
    targets, ignore = ([each] if isinstance(each, str) else list(each) for each in (targets, ignore))
    for label, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            _require_match(label, pattern, candidates)
    chosen = {
        name: layer
        for name, layer in candidates.items()
        if _any_match(name, targets) and not _any_match(name, ignore)
    }
    if not chosen:
        raise UserError(f"ignore: {ignore} leaves no layer to prune; remove a pattern")
    unknown = [x for x in _unknown(lm) if _any_match(x, targets) and not _any_match(x, ignore)]
    if unknown:
        _warn(
            f"{type(lm).__name__} has {len(unknown)} matrices of a layout that is not known, which stay dense: "
            + ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in unknown))
        )
    return chosen


@cache
def _warn(text: str) -> None:
    # A run looks at the layers more than once, and Python's own rule for repeated warnings is easily upset.
    warnings.warn(text, stacklevel=3)


def block_layers(lm: PreTrainedModel) -> dict[str, Layer]:
    """Every linear layer inside the decoder blocks, by name, in the model's order; none of a router.

    Raises:
        UserError: If there are no blocks, or no such layer in them.
    """
    blocks, stacks = decoder_blocks(lm), expert_layers(lm)
    found: dict[str, Layer] = {}
    for name, module in lm.named_modules():
        if name.startswith(f"{blocks}.") and not is_router(name):
            if isinstance(module, nn.Linear | Conv1D):
                turned = isinstance(module, Conv1D)
                first, second = module.weight.shape
                shape = (second, first) if turned else (first, second)
                found[name] = Layer(f"{name}.weight", shape, turned)
            found |= stacks.get(name, {})
    if not found:
        raise UserError(f"{type(lm).__name__} has no linear layers inside {blocks!r}; give another model")
    return found


def expert_layers(lm: PreTrainedModel) -> dict[str, dict[str, Layer]]:
    """The layers of all experts by name, by the module that holds a block's; see `stacked_experts`."""
    found: dict[str, dict[str, Layer]] = {}
    for name, module, own in stacked_experts(lm):
        experts, hidden, inner = module.down_proj.shape
        gate_up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
        found[name] = {}
        for i in range(experts):
            found[name] |= {
                f"{name}.{i}.{own.gate}": Layer(gate_up, (inner, hidden), expert=i),
                f"{name}.{i}.{own.up}": Layer(gate_up, (inner, hidden), expert=i, first_row=inner),
                f"{name}.{i}.{own.down}": Layer(down, (hidden, inner), expert=i),
            }
    return found


def named_weights(lm: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters of a model by name, without gradient; experts' one by one, as views of their stacks."""
    weights = {name: parameter.detach() for name, parameter in lm.named_parameters()}
    for layers in expert_layers(lm).values():
        stacks = {name: weights.pop(name) for name in {layer.parameter for layer in layers.values()}}
        weights |= {f"{name}.weight": layer.view(stacks[layer.parameter]) for name, layer in layers.items()}
    return weights


def _unknown(lm: PreTrainedModel) -> list[str]:
    """Parameters in the blocks with rows and columns that no layer known here holds."""
    blocks, found = decoder_blocks(lm), []
    known = {layer.parameter for layer in block_layers(lm).values()}
    for name, module in lm.get_submodule(blocks).named_modules(prefix=blocks):
        if not isinstance(module, nn.Embedding) and not is_router(name):
            parameters = module.named_parameters(prefix=name, recurse=False)
            found += [own for own, parameter in parameters if parameter.ndim > 1 and own not in known]
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
    raise UserError(f"{type(lm).__name__} has no list of {depth} decoder blocks; give a model that has one")


def _require_match(label: str, glob: str, layers: Collection[str]) -> None:
    if glob not in layers and not any(matches(name, glob) for name in layers):
        raise UserError(
            f"{label}: {glob!r} matches none of the {len(layers)} linear layers; "
            f"they are named like {next(iter(layers))!r}"
        )


def _any_match(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class ChosenLayers:
    """The layers of a model by what becomes of them.

    Attributes:
        pruned: To be pruned, by name, in the model's order.
        dense: Left dense by their pattern, of those that were asked for.
        pattern: Of every one of them.
    """

    pruned: dict[str, Layer]
    dense: dict[str, Layer]
    pattern: Pattern

    @property
    def kept(self) -> int:
        """How many weights stay, of `prunable`."""
        patterns = {name: self.pattern.of(name) for name in self.pruned}
        kept = sum(x.numel // patterns[name].m * patterns[name].n for name, x in self.pruned.items())
        return kept + sum(layer.numel for layer in self.dense.values())

    @property
    def prunable(self) -> int:
        """How many weights there are, those of layers left dense among them."""
        return sum(layer.numel for layer in [*self.pruned.values(), *self.dense.values()])


def choose_layers(
    spec: str,
    lm: PreTrainedModel,
    pattern: Pattern,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
) -> ChosenLayers:
    """The layers to prune, see `prunable_layers`, and the pattern of each.

    Args:
        spec: The model's name, for the error.
        lm: The model; shapes are enough.
        pattern: Of all layers, or by glob.
        targets: Layers to prune.
        ignore: Layers to leave alone.

    Raises:
        UserError: If globs match nothing, no layer remains, M does not divide a layer, or the model is an encoder.
    """
    layers = prunable_layers(lm, targets, ignore)
    if isinstance(pattern, LayerPatterns):
        for glob in pattern.by_glob:
            _require_match("patterns", glob, layers)
    found = {name: pattern.find(name) for name in layers}
    pruned = {name: layer for name, layer in layers.items() if found[name] is not None}
    if not pruned:
        raise UserError(f"patterns: all {len(layers)} layers are left dense; give one of them N:M")
    for name, layer in pruned.items():
        pattern.of(name).check(layer.shape[1], name)
    _check_causal(spec, lm, pruned.values())
    dense = {name: layer for name, layer in layers.items() if found[name] is None}
    return ChosenLayers(pruned, dense, layer_patterns(found))


def _check_causal(spec: str, lm: PreTrainedModel, layers: Iterable[Layer]) -> None:
    # transformers would run an encoder as if it were a decoder that sees what it is to predict.
    owners = [lm.get_submodule(layer.module.rpartition(".")[0]) for layer in layers]
    causal = {owner.is_causal for owner in owners if hasattr(owner, "is_causal")}
    if causal == {False}:
        raise UserError(
            f"model {spec!r} is an encoder ({type(lm).__name__} attends to the text that follows); "
            "give a causal language model"
        )


def stored_names(lm: PreTrainedModel, names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Map parameter names of a loaded model to the names of the same tensors on disk.

    Raises:
        UserError: If a parameter is on disk under no known name.
    """
    keys = {loaded: key for key, loaded in _renamed(lm, stored).items()}
    return {name: keys[_among(keys, name, lm, "stored tensors; leave it out (ignore)")] for name in names}


def loaded_names(lm: PreTrainedModel, stored: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Map names of tensors on disk to those of the parameters they become.

    Raises:
        UserError: If the model has no such parameter.
    """
    known = set(names)
    what = "parameters; give the model that it was made for, without adapters and parametrizations"
    return {key: _among(known, name, lm, what) for key, name in _renamed(lm, stored).items()}


def _renamed(lm: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Names on disk → names as loading renames them; what it stacks afterwards keeps a name of its own."""
    renamings = [rule for rule in get_model_conversion_mapping(lm) if isinstance(rule, WeightRenaming)]
    renamed = {}
    for key in sorted(stored):
        name = key
        for rule in renamings:
            name, _ = rule.rename_source_key(name)
        renamed[key] = name
    return renamed


def _among(known: Collection[str], name: str, lm: PreTrainedModel, what: str) -> str:
    # Some checkpoints (GPT-2's) leave out the prefix of the inner model, others keep it.
    prefix = f"{lm.base_model_prefix}."
    for option in (name, name.removeprefix(prefix), prefix + name):
        if option in known:
            return option
    raise UserError(f"{name!r} is not among the model's {len(known)} {what}")


def stored_weights(source: ModelSource, lm: PreTrainedModel, layers: Iterable[str]) -> dict[str, str]:
    """Layer name → the name of its weight as stored on disk; of a model without safetensors, as in memory.

    Raises:
        UserError: If a weight is on disk under no known name.
    """
    names = {layer: f"{layer}.weight" for layer in layers}
    if not source.is_stored:
        return names
    stored = stored_names(lm, names.values(), StoredTensors(source.directory))
    return {layer: stored[name] for layer, name in names.items()}
