"""Mixtures of experts: a block's experts lie stacked in one tensor, and on disk every expert has three matrices.

transformers stacks them into `gate_up_proj` [experts, 2 × inner, hidden] and `down_proj` [experts, hidden, inner].
Here they have the names on disk, so that whatever works on layers works on experts.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_utils import PreTrainedModel

# The layout and the arithmetic of most mixtures, as transformers marks its modules; releases before it came had no
# norm after an expert.
_LAYOUT: Final = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
_NORM: Final = "has_post_expert_norm"
# How transformers stacks what is stored, from which an expert's names are read off.
_STACKED: Final = ((MergeModulelist, 0),)
_STACKED_PAIRS: Final = (*_STACKED, (Concatenate, 1))
# Modules that choose among experts: Mixtral's `gate`, DBRX's `router.layer`, Qwen2-MoE's `shared_expert_gate`.
_ROUTER: Final = re.compile(r"gate|.*router.*|.*experts?_gate")


class ExpertNames(NamedTuple):
    """What the matrices of one expert are called on disk: `w1`, `w3` and `w2` in Mixtral."""

    gate: str
    up: str
    down: str


def stacked_experts(lm: PreTrainedModel) -> Iterator[tuple[str, Any, ExpertNames]]:
    """The modules that hold a block's experts, by dotted name, and what an expert's matrices are called.

    Those of another layout, with another arithmetic, or stored in stacks are not among them.
    """
    converters = [x for x in get_model_conversion_mapping(lm) if isinstance(x, WeightConverter)]
    for name, module in lm.named_modules():
        if _is_known(module):
            pair = _sources(converters, name, "gate_up_proj", _STACKED_PAIRS)
            single = _sources(converters, name, "down_proj", _STACKED)
            if len(pair) == 2 and len(single) == 1:
                yield name, module, ExpertNames(*pair, *single)


def _is_known(module: nn.Module) -> bool:
    marked = all(getattr(module, flag, None) is value for flag, value in _LAYOUT.items())
    if not marked or getattr(module, _NORM, False):
        return False
    # A class may bring a gate of its own; the one that all others share comes with the decorator.
    return bool(module._apply_gate.__module__ == use_experts_implementation.__module__)


def _sources(
    converters: Iterable[WeightConverter], module: str, parameter: str, wanted: tuple[tuple[type, int], ...]
) -> list[str]:
    """What is stacked into a parameter, by the names of an expert's layers on disk; empty if made in another way."""
    for converter in converters:
        target = converter.target_patterns[0]
        made = tuple((type(operation), getattr(operation, "dim", None)) for operation in converter.operations)
        if made == wanted and f"{module}.{parameter}".endswith(target):
            stem = re.escape(target.removesuffix(f".{parameter}"))
            plain = (source.replace("\\", "") for source in converter.source_patterns)
            found = [re.fullmatch(rf"{stem}\.\*\.(\w+)\.weight", source) for source in plain]
            return [match[1] for match in found if match]
    return []


def is_router(name: str) -> bool:
    """Whether a module chooses among experts, or belongs to one that does, by any part of its dotted name."""
    return any(_ROUTER.fullmatch(part) for part in name.split("."))
