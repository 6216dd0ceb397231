"""What every sampler offers: logits in, a masked weight or a hard mask out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from roi_lightning.pattern import NMPattern
from roi_lightning.samplers.kept_norm import KeptNorm


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


class Sampler(ABC):
    """Turns the logits of one layer into masks.

    Attributes:
        method: Short name of the method that learns with it, in tables and files.
    """

    method: ClassVar[str]

    @abstractmethod
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern, dim: int) -> tuple[int, ...]:
        """The shape of the logits of a weight of shape `weight` with input dimension `dim`.

        Raises:
            UserError: If the pattern cannot be learned this way.
        """

    def remark(self, pattern: NMPattern) -> str | None:
        """What to tell who learns this pattern this way; None if there is nothing to tell."""
        return None

    @abstractmethod
    def initial_logits(
        self, noise: Tensor, mask: Tensor | None, strength: float, pattern: NMPattern, dim: int
    ) -> Tensor:
        """Where the logits start.

        Args:
            noise: fp32 random start, of the logits' shape.
            mask: Boolean prior mask of the weight's shape, or None.
            strength: How far kept and pruned members are pushed apart; 0 ignores the mask.
            pattern: The pattern of the mask.
            dim: The weight's input dimension.
        """

    @abstractmethod
    def masked_weight(
        self,
        weight: Tensor,
        logits: Tensor,
        pattern: NMPattern,
        dim: int,
        draw: Draw,
        layer: str,
        kept_norm: KeptNorm | None = None,
    ) -> Tensor:
        """The weight under a randomly drawn mask, differentiable in the logits.

        Args:
            weight: Frozen, [out, in] (or [in, out] with `dim` 0), any float dtype.
            logits: fp32, of `logits_shape`.
            pattern: The N:M pattern.
            dim: The weight's input dimension.
            draw: Which mask to draw.
            layer: The layer's name, part of the noise's key.
            kept_norm: If given, told of the drawn weight, and its gradient is added to the mask's.

        Returns:
            Shape and dtype of `weight`.
        """

    @abstractmethod
    def hard_mask(self, logits: Tensor, pattern: NMPattern, dim: int) -> Tensor:
        """The mask without noise: boolean, the weight's shape, exactly N of every M true."""

    @abstractmethod
    def choices(self, logits: Tensor, pattern: NMPattern, dim: int) -> Tensor:
        """The logits as a view [..., choices], without a copy: what each group chooses from, in its last axis."""

    @abstractmethod
    def picks(self, pattern: NMPattern) -> int:
        """How many of its choices a group takes."""
