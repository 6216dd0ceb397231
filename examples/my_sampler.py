"""A sampler of your own: N independent picks instead of picks without replacement, straight-through.

    roi-lightning fit --config quickstart.yaml --model.sampler my_sampler.IndependentPicks --model.sampler.sharpness 2

A sampler makes the masked weight of a training step; gradients are autograd's. With one logit a weight, all else is
in `PerWeightSampler`; with another number of logits, derive from `Sampler`.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Draw, PerWeightSampler


@dataclass(frozen=True)
class IndependentPicks(PerWeightSampler):
    """The N largest noisy logits of a group forward, N times their softmax backward.

    Args:
        sharpness: Divides the softmax temperature τ.
    """

    method = "independent"

    sharpness: float = 1.0

    @override
    def masked_weight(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
        keys = logits / draw.lam + draw.noise_like(logits, pattern)
        soft = pattern.n * (pattern.group(keys) * self.sharpness / draw.tau).softmax(-1).flatten(-2)
        mask = pattern.top(keys.detach()) + soft - soft.detach()
        return (weight.float() * mask).to(weight.dtype)
