"""A learner of your own: scores of the weights, learned straight-through and without noise.

    roi-lightning fit --config quickstart.yaml --model my_learner.ScoreModule --model.scale 0.1

A layer says how its learned parameter makes the weight of a training step, and its hard mask; a module attaches such
layers and sets up each micro-batch. Optimizer, text, checkpoints, validation and export are `MaskLearningModule`'s.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.samplers.masked_linear import LayerState, MaskedLinear, attach
from roi_lightning.utils.dtensor import full_tensor


@dataclass(kw_only=True)
class ScoreState(LayerState):
    """What all layers share: pattern, mode, and the scale of the first scores."""

    scale: float


class ScoredLinear(MaskedLinear):
    """A layer that keeps the N highest scores of each group; they start as its weights' magnitudes."""

    learned = ("scores",)
    state: ScoreState

    def __init__(self, dense: nn.Linear | Conv1D, name: str, state: ScoreState) -> None:
        super().__init__(dense, name, state)
        self.scores = nn.Parameter(self.weight.detach().float().abs() * state.scale)

    @override
    def drawn_weight(self) -> Tensor:
        mask = self.pattern.top(self.scores.detach()) + self.scores - self.scores.detach()
        return (self.weight.float() * mask).to(self.weight.dtype)

    @override
    def hard_mask(self) -> Tensor:
        return self.pattern.top(full_tensor(self.scores.detach()))  # all of it where it is sharded


class ScoreModule(MaskLearningModule):
    """Learns one score per weight; the gradient of the mask goes to the scores.

    Args:
        scale: Of the first scores: below 1, training departs from magnitude's mask sooner.
        kwargs: As in `MaskLearningModule`.
    """

    learns, method = "scores", "scores"
    state: ScoreState

    def __init__(self, lm: str, *, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.state = ScoreState(self.pattern, scale=scale)

    @override
    def attach(self, lm: PreTrainedModel, layers: dict[str, nn.Linear | Conv1D]) -> dict[str, ScoredLinear]:
        return attach(lm, layers, self.state, ScoredLinear)

    @override
    def prepare_step(self, batch_idx: int) -> None:
        self.state.mode = "sample"

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"scale": self.state.scale}  # in a run's recipe and its export
