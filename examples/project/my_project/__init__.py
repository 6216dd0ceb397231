"""The learner of this project: RoI's, with a penalty on masks that treat a layer's inputs unevenly."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.samplers.schedules import Schedule


@dataclass(frozen=True)
class Ramp(Schedule):
    """Zero at first, then a straight line up to `end` at the end of the run.

    Args:
        end: Value at the end.
        begin: Fraction of the run after which the line begins, below 1.
    """

    end: float = 1.0
    begin: float = 0.25

    @override
    def at(self, step: int, total: int) -> float:
        progress = (step / total - self.begin) / (1 - self.begin)
        return self.end * max(0.0, progress)


class EvenModule(RoILightningModule):
    """RoI, where a mask costs more that keeps much of some inputs and little of others.

    Args:
        evenness: What `unevenness` is multiplied by before it is added to the loss, by optimizer step.
        kwargs: As in `RoILightningModule`.
    """

    def __init__(self, lm: str, *, evenness: Schedule = Ramp(), **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.evenness = evenness

    @property
    @override
    def method(self) -> str:
        return "even"

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        # Draws a mask for every layer, writes the masked weights into the student, and measures its loss.
        loss = super().training_step(batch, batch_idx)
        # `student` is differentiable; what reaches it in the backward pass goes on to the logits.
        layers = [unevenness(each.part(each.student), each.dense) for each in self.tensors.values()]
        penalty = torch.stack(layers).mean()
        self.log("train/unevenness", penalty.detach(), sync_dist=True)
        return loss + self.evenness.at(self.trainer.global_step, self.trainer.max_steps) * penalty

    @override
    def annealing(self) -> dict[str, float]:
        value = self.evenness.at(self.trainer.global_step, self.trainer.max_steps)
        return super().annealing() | {"anneal/evenness": value}  # in the logs

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"evenness": self.evenness}  # in the export, and compared by a resume


def unevenness(masked: Tensor, dense: Tensor) -> Tensor:
    """How much the share of an input's weights that is kept differs between the inputs of a layer.

    Args:
        masked: The masked weight, [..., out, in].
        dense: The dense one, likewise.

    Returns:
        The variance over inputs of the share of their squared norm; 0 if all keep as much.
    """
    norm = dense.float().square().sum(-2)
    share = masked.float().square().sum(-2) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return share.var(-1).mean()
