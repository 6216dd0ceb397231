"""RoI's passes over weights on NVIDIA GPUs, through the kernels of `triton_top_k`, where Triton is installed."""

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from roi_lightning.fallible import Fallible
from roi_lightning.pattern import NMPattern

kernels = Fallible("Triton's kernels can't be used here", logging.INFO)
# Weights of one program: eight for each of its threads.
_TILE = 1024


@dataclass(frozen=True)
class TritonWay:
    """Through the kernels; see `drawn.Way`.

    Attributes:
        pattern: The N:M pattern.
        columns: How far apart the members of a group lie.
        key: Of the noise.
        over_lam: 1/λ.
        over_tau: 1/τ.
        push: Factor on log(1 - μ).
        pull: Of `KeptNorm`, fp32 scalar on the weight's device; None without it.
        hard: Whether the forward pass takes the hard mask.
    """

    pattern: NMPattern
    columns: int
    key: tuple[int, int]
    over_lam: float
    over_tau: float
    push: float
    pull: Tensor | None
    hard: bool

    def masked_weight(self, weight: Tensor, logits: Tensor, out: Tensor) -> bool:
        """Write weight * mask into `out`; whether that could be done."""
        return self._launch("masked_weight", weight, logits, weight, out)

    def logits_gradient(self, weight: Tensor, logits: Tensor, grad: Tensor, out: Tensor) -> bool:
        """Write the gradient of the logits into `out`; whether that could be done."""
        pull = logits if self.pull is None else self.pull  # something to point at, which is not read
        kept_norm = self.pull is not None
        return self._launch("logits_gradient", weight, logits, weight, grad, out, pull, KEPT_NORM=kept_norm)

    def _launch(self, name: str, weight: Tensor, *tensors: Tensor, **constants: bool) -> bool:
        def launch() -> None:
            groups, (shape, grid) = weight.numel() // self.pattern.m, _shape(weight, self.pattern)
            with torch.cuda.device_of(weight):
                kernel = getattr(_module(), name)[grid]
                kernel(*tensors, groups, *self._numbers, HARD=self.hard, **constants, **shape)

        return kernels.try_to(launch)

    @property
    def _numbers(self) -> tuple[int | float, ...]:
        return self.columns, *self.key, self.over_lam, self.over_tau, self.push


def _shape(weight: Tensor, pattern: NMPattern) -> tuple[dict[str, int], tuple[int]]:
    width = 1 << (pattern.m - 1).bit_length()
    tile = max(1, _TILE // width)
    constants = {"M": pattern.m, "N": pattern.n, "WIDTH": width, "TILE": tile}
    return constants, (-(-weight.numel() // pattern.m // tile),)


@cache
def _module() -> Any:
    # Imported when first needed: it needs Triton, which machines without a GPU may lack.
    return importlib.import_module("roi_lightning.samplers.triton_top_k")
