"""What every sampler offers: logits in, a masked weight or a hard mask out.

A weight is [out, in] here, or [experts, out, in], and contiguous: the groups of a pattern lie along its last axis.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers.noise import gumbel, noise_key, to_int32


@dataclass(frozen=True)
class Draw:
    """The coordinates of one random mask of a tensor; the same draw always gives the same mask.

    Attributes:
        key: Of the noise, two numbers in the range of int32; see `noise_key`.
        lam: Sampling temperature λ, above 0; the logits are divided by it.
        tau: Softmax temperature τ, above 0.
        first: The first group of the whole tensor that is here, where the tensor is sharded.
        numbers: On a GPU the key and the bits of 1/λ and 1/τ, int32 [4]; see `on_device`.
    """

    key: tuple[int, int]
    lam: float
    tau: float
    first: int = 0
    numbers: Tensor | None = None

    @classmethod
    def of(cls, seed: int, index: int, name: str, lam: float, tau: float, first: int = 0) -> Self:
        """The draw of a tensor.

        Args:
            seed: Of the run.
            index: The global micro-batch index.
            name: The tensor's.
            lam: Sampling temperature λ.
            tau: Softmax temperature τ.
            first: The first group that is here.
        """
        return cls(noise_key(seed, index, name), lam, tau, first)

    def noise(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        """Standard Gumbel noise for logits, one per weight: fp32, of their shape."""
        index = torch.arange(logits.numel(), dtype=torch.int32, device=logits.device)
        return gumbel(index + to_int32(self.first * pattern.m), self.key).view(logits.shape)


def on_device(draws: Sequence[Draw], device: torch.device) -> list[Draw]:
    """Draws whose numbers kernels read on the device, copied there at once and without waiting for it."""
    if device.type != "cuda":
        return list(draws)
    floats = np.array([(1 / draw.lam, 1 / draw.tau) for draw in draws], dtype=np.float32).view(np.int32)
    keys = np.array([draw.key for draw in draws], dtype=np.int32)
    numbers = torch.from_numpy(np.hstack((keys, floats))).pin_memory().to(device, non_blocking=True)
    return [replace(draw, numbers=own) for draw, own in zip(draws, numbers, strict=True)]


class Inputs(NamedTuple):
    """What both passes of a sampler of this package need; tensors are contiguous.

    Attributes:
        weight: [..., out, in], any float dtype.
        logits: fp32.
        pattern: The N:M pattern.
        draw: Which mask to draw.
        hard: Whether the forward pass takes the hard mask.
        scaled: Whether log(1 - μ) is divided by τ between the picks of the relaxed Gumbel-Top-K.
    """

    weight: Tensor
    logits: Tensor
    pattern: NMPattern
    draw: Draw
    hard: bool = False
    scaled: bool = False

    @property
    def push(self) -> float:
        """The factor on log(1 - μ)."""
        return 1 / self.draw.tau if self.scaled else 1.0


class Sampler(ABC):
    """Turns the logits of a tensor into masks.

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
    def masked_weight(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
        """The weight under a randomly drawn mask, differentiable in the logits.

        Args:
            weight: Frozen, any float dtype.
            logits: fp32, of `logits_shape`.
            pattern: The N:M pattern.
            draw: Which mask to draw.

        Returns:
            Shape and dtype of `weight`.
        """

    def fill(self, out: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> None:
        """Write the weight under a randomly drawn mask into `out`, which is like it, without autograd.

        Raises:
            UserError: If `masked_weight` gives another shape.
        """
        with torch.no_grad():
            drawn = self.masked_weight(weight, logits, pattern, draw)
        if drawn.shape != weight.shape:
            raise UserError(
                f"{type(self).__name__}.masked_weight made {list(drawn.shape)} of a weight {list(weight.shape)}; "
                "return a tensor of the weight's shape"
            )
        out.copy_(drawn)

    def logits_gradient(
        self, gradient: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw
    ) -> Tensor:
        """The gradient of the logits, fp32, by that of the masked weight, which is made again."""
        own = logits.detach().requires_grad_()
        with torch.enable_grad():
            drawn = self.masked_weight(weight, own, pattern, draw)
        return torch.autograd.grad(drawn, own, gradient)[0]

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
