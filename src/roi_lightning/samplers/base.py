"""What every sampler offers: logits in, a masked weight or a hard mask out.

A weight is one tensor of a model, or the shard of it that is here: [out, in] or, of experts, [experts, out, in],
contiguous. The groups of a pattern lie along its last axis.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers.noise import gumbel, noise_key, signed


@dataclass(frozen=True)
class Draw:
    """One random mask of one tensor; the same draw always gives the same mask.

    Attributes:
        key: Of the noise, from `noise_key`.
        lam: Sampling temperature λ, above 0; the logits are divided by it.
        tau: Softmax temperature τ, above 0.
        first: The first group that is here, where the tensor is sharded.
        numbers: On a GPU, int32 [4]: the key and the bits of 1/λ and 1/τ, see `on_device`.
    """

    key: tuple[int, int]
    lam: float
    tau: float
    first: int = 0
    numbers: Tensor | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, seed: int, index: int, name: str, lam: float, tau: float, first: int = 0) -> "Draw":
        """The draw number `index` of the tensor `name`, of a run with this seed."""
        return cls(noise_key(seed, index, name), lam, tau, first)

    def noise(self, groups: range, choices: int, device: torch.device) -> Tensor:
        """Standard Gumbel noise for some of the groups that are here, fp32 [groups, choices]."""
        start = signed((self.first + groups.start) * choices)
        index = torch.arange(len(groups) * choices, dtype=torch.int32, device=device).add_(start)
        return gumbel(index, self.key).view(len(groups), choices)

    def noise_like(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        """Standard Gumbel noise for logits of the weight's shape, one a weight; fp32."""
        groups = range(logits.numel() // pattern.m)
        return self.noise(groups, pattern.m, logits.device).view_as(logits)


def on_device(draws: Sequence[Draw], device: torch.device) -> list[Draw]:
    """The draws with their numbers on a device: one copy for all, and no wait for it."""
    keys = torch.tensor([draw.key for draw in draws], dtype=torch.int32)
    inverse = torch.tensor([(1 / draw.lam, 1 / draw.tau) for draw in draws], dtype=torch.float32)
    rows = torch.cat([keys, inverse.view(torch.int32)], 1)
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return [replace(draw, numbers=row) for draw, row in zip(draws, rows, strict=True)]


@dataclass(frozen=True)
class Kernel:
    """Both passes of one sampler at one pattern.

    Attributes:
        name: `gumbel_top_k`, `gumbel_subset` or `categorical`.
        pattern: The N:M pattern.
        size: Values that a group goes through, with which the code grows.
        scaled: Whether log(1 - μ) is divided by τ between the picks of the recursion.
        hard: Whether the forward pass takes the hard mask.
    """

    name: str
    pattern: NMPattern
    size: int
    scaled: bool = False
    hard: bool = False


class Sampler(ABC):
    """Turns the logits of one tensor into masks.

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
        """Write what `masked_weight` gives into `out`, a tensor like the weight.

        Raises:
            UserError: If it gives another shape.
        """
        with torch.no_grad():
            out.copy_(self._drawn(weight, logits, pattern, draw))

    def logits_gradient(
        self, gradient: Tensor, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw
    ) -> Tensor:
        """The gradient of the logits, given that of the masked weight; fp32, the logits' shape.

        Raises:
            UserError: If `masked_weight` gives another shape than the weight's.
        """
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            drawn = self._drawn(weight, own, pattern, draw)
        return torch.autograd.grad(drawn, own, gradient.to(drawn.dtype))[0]

    def _drawn(self, weight: Tensor, logits: Tensor, pattern: NMPattern, draw: Draw) -> Tensor:
        drawn = self.masked_weight(weight, logits, pattern, draw)
        if drawn.shape != weight.shape:
            raise UserError(
                f"{type(self).__name__}.masked_weight made {list(drawn.shape)} of a weight of {list(weight.shape)}; "
                "return a tensor of the weight's shape"
            )
        return drawn

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
