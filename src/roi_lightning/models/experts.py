"""Mixtures of experts with linear layers of their own, instead of tensors that hold the weights of all experts.

transformers stacks the experts of a block into `gate_up_proj` [experts, 2 × inner, hidden] and `down_proj`
[experts, hidden, inner]; on disk every expert has three matrices. Here it has them in memory too, as views of the
stacks and by the names on disk, so that whatever works on linear layers works on experts.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

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
    """What the layers of one expert are called on disk: `w1`, `w3` and `w2` in Mixtral."""

    gate: str
    up: str
    down: str


class SplitExperts(nn.Module):
    """The experts of one block, children `0`, `1` and so on with three linear layers each.

    Replaces an experts module of transformers and computes what its default implementation, `grouped_mm`, does, in
    the same order; only the product with gate and up is taken in two, which some kernels round otherwise. Experts
    without tokens are not called, unless several ranks learn together: each has to give a gradient for what another's
    tokens may meet.

    Args:
        stacked: The module replaced; its weights are shared, not copied.
        names: Of every expert's layers.
    """

    def __init__(self, stacked: Any, names: ExpertNames) -> None:
        super().__init__()
        self.act_fn, self.names, self.count = stacked.act_fn, names, len(stacked.down_proj)
        inner = stacked.down_proj.shape[2]
        for i, (gate_up, down) in enumerate(zip(stacked.gate_up_proj, stacked.down_proj, strict=True)):
            layers = map(_linear, (gate_up[:inner], gate_up[inner:], down))
            self.add_module(str(i), nn.ModuleDict(dict(zip(names, layers, strict=True))))

    @override
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send tokens through their experts.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: The experts of every token, [tokens, k].
            top_k_weights: What each counts, [tokens, k].

        Returns:
            [tokens, hidden].
        """
        order = top_k_index.flatten().sort(stable=True).indices
        tokens = (order // top_k_index.shape[1]).split(self.tokens_per_expert(top_k_index))
        everyone = torch.is_grad_enabled() and dist.is_initialized()
        called = [i for i, mine in enumerate(tokens) if len(mine) or everyone]
        outputs = [self._expert(i, hidden_states[tokens[i]]) for i in called]
        weighted = torch.cat(outputs) * top_k_weights.flatten()[order, None]
        return weighted[order.argsort()].view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def tokens_per_expert(self, top_k_index: Tensor) -> list[int]:
        """How many tokens each expert is sent."""
        counts: list[int] = top_k_index.flatten().bincount(minlength=self.count).tolist()
        return counts

    def _expert(self, index: int, x: Tensor) -> Tensor:
        layers = self.get_submodule(str(index))
        gate, up, down = (layers.get_submodule(name) for name in self.names)
        out: Tensor = down(self.act_fn(gate(x)) * up(x))
        return out


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    return layer


def split_experts(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """Give every expert of a model linear layers of its own, in place.

    Experts of another layout, with another arithmetic, or stored in stacks are left as they are.

    Returns:
        The modules that were replaced, by dotted name.
    """
    replaced: dict[str, nn.Module] = {}
    stacked = {name: module for name, module in lm.named_modules() if _is_known(module)}
    converters = [x for x in get_model_conversion_mapping(lm) if isinstance(x, WeightConverter)]
    for name, module in stacked.items():
        pair = _sources(converters, name, "gate_up_proj", _STACKED_PAIRS)
        single = _sources(converters, name, "down_proj", _STACKED)
        if len(pair) == 2 and len(single) == 1:
            lm.set_submodule(name, SplitExperts(module, ExpertNames(*pair, *single)))
            replaced[name] = module
    return replaced


def _is_known(module: nn.Module) -> bool:
    marked = all(getattr(module, flag, None) is value for flag, value in _LAYOUT.items())
    if not marked or getattr(module, _NORM, False):
        return False
    # A class may bring a gate of its own; the one that all others share comes with the decorator.
    return module._apply_gate.__module__ == use_experts_implementation.__module__


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


def expert_layers(lm: nn.Module) -> set[str]:
    """The names of all linear layers of experts, which may meet no token of a text."""
    return {
        f"{name}.{i}.{part}"
        for name, module in lm.named_modules()
        if isinstance(module, SplitExperts)
        for i in range(module.count)
        for part in module.names
    }
