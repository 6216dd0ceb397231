"""A training step of your own: RoI's loss and a penalty on what a draw prunes.

    roi-lightning fit --config quickstart.yaml --model my_training_step.Penalised --model.penalty 0.5

A step draws masks into the student, an ordinary model, and computes a loss. Whatever the loss is made of, its
gradient with respect to the student's weights goes on to the logits.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning import RoILightningModule


class Penalised(RoILightningModule):
    """RoI that is also asked to prune small weights.

    Args:
        penalty: Coefficient of the share of the weights' squared norm that a draw prunes, a mean over tensors.
        kwargs: As in `RoILightningModule`.
    """

    def __init__(self, lm: str, *, penalty: float = 0.5, **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.penalty = penalty

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # draws, and logs train/loss
        pairs = [(x.teacher.float(), x.student.float()) for x in self.tensors.values()]
        shares = [(dense - drawn).square().sum() / dense.square().sum() for dense, drawn in pairs]
        pruned = torch.stack(shares).mean()
        self.log("train/pruned", pruned.detach())
        return loss + self.penalty * pruned

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"penalty": self.penalty}  # in a run's recipe and its export
