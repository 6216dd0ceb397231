"""A learner of your own: scores of the weights, learned straight-through and without noise.

    roi-lightning fit --config quickstart.yaml --model my_learner.ScoreModule --model.scale 0.1

A learner says what is learned for a tensor, how the weight of a training step is made of it, and the hard mask.
Optimizer, text, checkpoints, validation and export are `MaskLearningModule`'s.
"""

from typing import Any

from torch import Tensor
from typing_extensions import override

from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.student import PrunedTensor
from roi_lightning.masks.pattern import NMPattern


class ScoreModule(MaskLearningModule):
    """Keeps the N highest scores of each group, which start as its weights' magnitudes.

    The gradient of the mask goes to the scores.

    Args:
        scale: Of the first scores: below 1, training departs from magnitude's mask sooner.
        kwargs: As in `MaskLearningModule`.
    """

    learns, method = "scores", "scores"

    def __init__(self, lm: str, *, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.scale = scale

    @override
    def shapes(self, shape: tuple[int, ...], pattern: NMPattern) -> dict[str, tuple[int, ...]]:
        return {"scores": shape}  # one for each weight

    @override
    def begin(self, tensor: PrunedTensor) -> None:
        tensor.here("scores").copy_(tensor.dense.abs() * self.scale)

    @override
    def training_weight(self, tensor: PrunedTensor, **learned: Tensor) -> Tensor:
        scores, dense = learned["scores"], tensor.dense
        mask = tensor.pattern.top(scores.detach()) + scores - scores.detach()
        return (dense.float() * mask).to(dense.dtype)

    @override
    def hard_mask(self, tensor: PrunedTensor) -> Tensor:
        return tensor.pattern.top(tensor.whole("scores"))  # all of it where it is sharded

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"scale": self.scale}  # in a run's recipe and its export
