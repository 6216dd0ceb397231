"""Experts with linear layers of their own, which can be packed one by one, instead of stacks."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.models.experts import ExpertNames, stacked_experts


class SplitExperts(nn.Module):
    """The experts of one block, children `0`, `1` and so on with three linear layers each.

    Replaces an experts module of transformers and computes what its default implementation, `grouped_mm`, does, in
    the same order; only the product with gate and up is taken in two, which some kernels round otherwise.

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
        counts: list[int] = top_k_index.flatten().bincount(minlength=self.count).tolist()
        tokens = (order // top_k_index.shape[1]).split(counts)
        outputs = [self._expert(i, hidden_states[mine]) for i, mine in enumerate(tokens) if len(mine)]
        weighted = torch.cat(outputs) * top_k_weights.flatten()[order, None]
        return weighted[order.argsort()].view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

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

    Returns:
        The modules that were replaced, by dotted name.
    """
    found = list(stacked_experts(lm))
    for name, module, names in found:
        lm.set_submodule(name, SplitExperts(module, names))
    return {name: module for name, module, _ in found}
