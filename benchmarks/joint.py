"""Mask and kept weights learned together, to be compared with one after the other at as many tokens.

    python -m roi_lightning fit --config quickstart.yaml --model benchmarks.joint.JointModule …

Every draw masks the weights as they are trained so far. Logits learn as RoI's do; a weight's gradient is the drawn
weight's times the drawn mask, as if that were fixed. At the end the mask is hardened, and the weights under it are
exported.
"""

from collections.abc import Mapping
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.learning import RoILightningModule
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear, attach


class JointLinear(SparseLinear):
    """A layer with logits whose weights are trained, too, in a float32 copy `values` [out, in]."""

    def __init__(self, dense: nn.Linear | Conv1D, name: str, state: SharedState) -> None:
        super().__init__(dense, name, state)
        self.values = nn.Parameter(self.weight.detach().float())

    @override
    def drawn_weight(self) -> Tensor:
        state, weight = self.state, self.values.to(self.weight.dtype)
        assert state.draw is not None
        drawn = state.sampler.masked_weight(
            weight.detach(), self.logits, self.pattern, state.draw, self.name, state.kept_norm
        )
        mask = torch.where(weight == 0, 0, drawn / weight).detach()
        return drawn + (weight - weight.detach()) * mask

    @override
    def fix(self, mask: Tensor | None) -> None:
        trained = self.values.detach().to(self.weight.dtype)
        self._fixed = None if mask is None else trained.masked_fill(~mask, 0)


class JointModule(RoILightningModule):
    """RoI, and beside the logits the weights.

    Args:
        lm: As in `RoILightningModule`.
        lr_values: Learning rate of the weights at the first step; a cosine leads that of both to a tenth.
        kwargs: As in `RoILightningModule`.
    """

    def __init__(self, lm: str, *, lr_values: float = 5e-4, **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.lr_values = lr_values

    @override
    def attach(self, lm: PreTrainedModel, layers: dict[str, nn.Linear | Conv1D]) -> dict[str, SparseLinear]:
        return dict(attach(lm, layers, self.state, JointLinear))

    @override
    def learned_names(self) -> set[str]:
        return super().learned_names() | {f"lm.{name}.values" for name in self.layers}

    @override
    def _configured(self) -> tuple[torch.optim.Optimizer, LambdaLR]:
        groups: list[Any] = [{"params": [layer.logits for layer in self.layers.values()]}]
        groups.append({"params": list(self._values().values()), "lr": self.lr_values})
        optimizer, steps = self.optimizer(groups), self.trainer.max_steps
        return optimizer, LambdaLR(optimizer, lambda step: 0.55 + 0.45 * cos(pi * min(1, step / steps)))

    def _values(self) -> Mapping[str, nn.Parameter]:
        return {name: layer.get_parameter("values") for name, layer in self.layers.items()}

    @override
    def updates(self) -> dict[str, Tensor]:
        stored, values = self.stored_weights, self._values()
        changed: dict[str, Tensor] = {}
        for name, mask in self.hard_masks():
            rows = values[name].detach().masked_fill(~mask, 0).cpu()
            rows = rows.T.contiguous() if self.layers[name].transposed else rows
            changed[stored[name]] = rows.to(self.base[stored[name]].dtype)
        return changed

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"lr_values": self.lr_values}
