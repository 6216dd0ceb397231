"""Which layers of a model can be packed, and why the others can't."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roi_lightning.contrib.packed.format import PATTERN
from roi_lightning.errors import UserError
from roi_lightning.models.layers import prunable_layers

Dense = nn.Linear | Conv1D
# The modules that hold a parameter, by the parameter's identity and their names.
Owners = dict[int, dict[str, nn.Module]]

_log: Final = logging.getLogger(__name__)
# Layers of state-space models whose weight the model multiplies by itself, without calling them.
READ_BY_THE_MODEL: Final = ("dt_proj",)
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_NOT_SPARSE: Final = f"the weight is not {PATTERN} sparse"
# Groups in which a pattern is looked for, to say what a model has instead.
_SIZES: Final = (4, 8, 16, 32)


def input_dim(layer: nn.Module) -> int:
    """The input dimension of a layer's weight: 0 for GPT-2's `Conv1D` ([in, out]), else 1 ([out, in])."""
    return 0 if isinstance(layer, Conv1D) else 1


def owners_of(lm: nn.Module) -> Owners:
    """Who holds each parameter of a model, under every name."""
    owners: Owners = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        owners.setdefault(id(parameter), {})[module] = lm.get_submodule(module)
    return owners


def split_packable(lm: PreTrainedModel, owners: Owners) -> tuple[dict[str, Dense], dict[str, str]]:
    """Split the linear layers inside the decoder blocks; those that stay dense are logged, a line for each reason.

    Experts are split beforehand, see `split_experts`.

    Returns:
        The layers that can be packed, by name, and why each of the others can't.

    Raises:
        UserError: If none can be packed.
    """
    layers: dict[str, Dense] = {name: lm.get_submodule(name) for name in prunable_layers(lm)}  # type: ignore[misc]
    known = {id(layer) for layer in layers.values()}
    reasons = {name: _why_dense(name, layer, owners, known) for name, layer in layers.items()}
    left = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(left) == len(layers):
        raise _nothing_to_pack(layers, left)
    warn_reasons(left, len(layers), "stay dense")
    return {name: layer for name, layer in layers.items() if name not in left}, left


def warn_reasons(reasons: Mapping[str, str], layers: int, what: str) -> None:
    """Log each reason once, with the number of layers it holds for and the first."""
    for reason, count in Counter(reasons.values()).items():
        first = next(name for name in reasons if reasons[name] == reason)
        _log.warning("%d of %d layers %s, %s first: %s", count, layers, what, first, reason)


def _why_dense(layer_name: str, layer: Dense, owners: Owners, known: set[int]) -> str | None:
    """Why a layer can't be packed, in words that fit others too; None if it can."""
    weight, inputs = layer.weight, layer.weight.shape[input_dim(layer)]
    if layer_name.endswith(READ_BY_THE_MODEL):
        return "the model reads the weight itself"
    if weight.is_meta:
        return "the weight is not in memory"
    if weight.dtype not in _DTYPES:
        return f"the weight is {weight.dtype}"
    if inputs % PATTERN.m:
        return f"{inputs} inputs do not come in fours"
    if _max_kept(layer, PATTERN.m) > PATTERN.n:
        return _NOT_SPARSE
    others = (name for name, module in owners[id(weight)].items() if id(module) not in known)
    return next((f"{name} has the same weight" for name in others), None)


def _max_kept(layer: Dense, m: int) -> int:
    """The most weights that are not zero in any group of `m` inputs."""
    dim = input_dim(layer)
    groups = (layer.weight.detach() != 0).unflatten(dim, (-1, m))
    return int(groups.sum(dim + 1, dtype=torch.uint8).max())


def _nothing_to_pack(layers: Mapping[str, Dense], left: Mapping[str, str]) -> UserError:
    ((why, _),) = Counter(left.values()).most_common(1)
    if why == _NOT_SPARSE:
        why = f"layers {Counter(map(_kept, layers.values())).most_common(1)[0][0]}"
    return UserError(
        f"none of {len(layers)} layers can be packed ({why}): only {PATTERN} can be accelerated; "
        f"prune or learn with --pattern {PATTERN}"
    )


def _kept(layer: Dense) -> str:
    """What a layer keeps, by the smallest groups that leave something out."""
    inputs = layer.weight.shape[input_dim(layer)]
    counts = ((_max_kept(layer, m), m) for m in _SIZES if inputs % m == 0)
    return next((f"keep {n} of {m}" for n, m in counts if n < m), "are dense")
