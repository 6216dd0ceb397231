"""What every sampler offers: logits in, a masked weight or a hard mask out.

Inside, a weight is always [out, in]: the groups of a pattern lie along its last axis.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.masks.pattern import NMPattern


@dataclass(frozen=True)
class Draw:
    """The coordinates of one random mask; the same draw always gives the same mask.

    Attributes:
        seed: Of the run.
        index: The global micro-batch index.
        lam: Sampling temperature λ, above 0; the logits are divided by it.
        tau: Softmax temperature τ, above 0.
    """

    seed: int
    index: int
    lam: float
    tau: float


class DrawArgs(NamedTuple):
    """One layer's draw in plain values, as the operators of `dispatch` take it.

    Attributes:
        n: Elements kept of each group.
        m: Elements of a group.
        key0: Of the noise, int32.
        key1: Of the noise, int32.
        lam: Sampling temperature λ.
        tau: Softmax temperature τ.
        kept_norm: Whether the drawn weight's squared norm is wanted.
        compiled: Whether large layers may go through compiled code.
        push: Factor on log(1 - μ) between the picks of the relaxed Gumbel-Top-K.
        hard: Whether its forward pass takes the hard mask.
    """

    n: int
    m: int
    key0: int
    key1: int
    lam: float
    tau: float
    kept_norm: bool
    compiled: bool
    push: float = 1.0
    hard: bool = False


@dataclass
class KeptNorm:
    """A reward for keeping large weights: coefficient times the squared norm of the drawn weights, off the loss.

    The samplers' backward pass adds its gradient to the mask's in fp32; in the drawn weight's own gradient, bf16
    would swallow a term this small.

    Attributes:
        coefficient: At this optimizer step, above 0.
        value: Sum over layers of the squared Frobenius norm of the drawn weight, differentiable fp32 scalar; None
            before the first layer.
    """

    coefficient: float
    value: Tensor | None = None

    def add(self, squared_norm: Tensor) -> None:
        """Count one layer's drawn weight."""
        self.value = squared_norm if self.value is None else self.value + squared_norm


class Sampler(ABC):
    """Turns the logits of one layer into masks.

    Attributes:
        method: Short name of the method that learns with it, in tables and files.
    """

    method: ClassVar[str]

    @abstractmethod
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern) -> tuple[int, ...]:
        """The shape of the logits of a weight of shape `weight`.

        Raises:
            UserError: If the pattern cannot be learned this way.
        """

    def advice(self, pattern: NMPattern, tau: float) -> str | None:
        """A hint for whoever learns a pattern this way, with τ no higher than `tau`; None if there is none."""
        return None

    @abstractmethod
    def initial_logits(
        self, noise: Tensor, mask: Tensor | None, strength: float, pattern: NMPattern
    ) -> Tensor:
        """Where the logits start.

        Args:
            noise: fp32 random start, of the logits' shape.
            mask: Boolean prior mask of the weight's shape, or None.
            strength: How far kept and pruned elements are pushed apart; 0 ignores the mask.
            pattern: The pattern of the mask.
        """

    @abstractmethod
    def masked_weight(
        self,
        weight: Tensor,
        logits: Tensor,
        pattern: NMPattern,
        draw: Draw,
        layer: str,
        kept_norm: KeptNorm | None = None,
    ) -> Tensor:
        """The weight under a randomly drawn mask, differentiable in the logits.

        Args:
            weight: Frozen, [out, in], any float dtype.
            logits: fp32, of `logits_shape`.
            pattern: The N:M pattern.
            draw: Which mask to draw.
            layer: The layer's name, part of the noise's key.
            kept_norm: If given, receives the drawn weight's squared norm.

        Returns:
            Shape and dtype of `weight`.
        """

    @abstractmethod
    def hard_mask(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        """The mask without noise: boolean, the weight's shape, exactly N of every M true."""

    @abstractmethod
    def choices(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        """The logits as a view [..., choices], without a copy: what each group chooses from, in its last axis."""

    @abstractmethod
    def picks(self, pattern: NMPattern) -> int:
        """How many of its choices a group takes."""


class PerWeightSampler(Sampler):
    """A sampler with one logit per weight, whose hard mask is the N largest of each group.

    A subclass adds `method` and `masked_weight`.
    """

    @override
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern) -> tuple[int, ...]:
        return weight

    @override
    def initial_logits(
        self, noise: Tensor, mask: Tensor | None, strength: float, pattern: NMPattern
    ) -> Tensor:
        return noise if mask is None else noise + torch.where(mask, strength, -strength)

    @override
    def hard_mask(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        return pattern.top(logits.detach())

    @override
    def choices(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        return pattern.group(logits)

    @override
    def picks(self, pattern: NMPattern) -> int:
        return pattern.n
