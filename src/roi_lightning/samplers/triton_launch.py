"""The samplers' passes over weights on NVIDIA GPUs, through Triton's kernels, where Triton is installed."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import comb
from operator import mul
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.samplers.base import Inputs, on_device
from roi_lightning.utils.cpp_extension import FastPath

kernels = FastPath("Triton's kernels can't be used here", logging.INFO)
# Weights of one program: eight for each of its threads.
_TILE: Final = 1024


@dataclass(frozen=True)
class TritonKernel:
    """The passes of one sampler; see `kernels.Kernel`.

    Attributes:
        module: Where the kernels are, in this package.
        code_size: What the code grows with, by M and N.
        max_size: Beyond, compiling would take minutes.
        subset: Of `triton_kernels`: whether the relaxation goes over whole masks.
    """

    module: str
    code_size: Callable[[int, int], int]
    max_size: int
    subset: bool | None = None

    def fill(self, inputs: Inputs, out: Tensor) -> bool:
        """Write weight * mask into `out`."""
        return self._launch("masked_weight", inputs, out)

    def logits_gradient(self, inputs: Inputs, gradient: Tensor, out: Tensor) -> bool:
        """Write the gradient of the logits into `out`."""
        return self._launch("logits_gradient", inputs, gradient, out)

    def _launch(self, name: str, inputs: Inputs, *tensors: Tensor) -> bool:
        weight, pattern = inputs.weight, inputs.pattern
        if self.code_size(pattern.m, pattern.n) > self.max_size:
            return False
        width = 1 << (pattern.m - 1).bit_length()
        tile, groups = max(1, _TILE // width), weight.numel() // pattern.m
        (draw,) = (
            [inputs.draw] if inputs.draw.numbers is not None else on_device([inputs.draw], weight.device)
        )
        constants = {"M": pattern.m, "N": pattern.n, "WIDTH": width, "TILE": tile}
        if self.subset is not None:
            constants |= {"HARD": inputs.hard, "SCALED": inputs.scaled, "SUBSET": self.subset}

        def launch() -> None:
            with torch.cuda.device_of(weight):
                getattr(_module(self.module), name)[-(-groups // tile),](
                    inputs.logits, weight, *tensors, draw.numbers, groups, draw.first, **constants
                )

        return kernels.attempt(launch)


@cache
def _module(name: str) -> Any:
    # Imported when first needed: it needs Triton, which machines without a GPU may lack.
    return importlib.import_module(f"roi_lightning.samplers.{name}")


top_k = TritonKernel("triton_kernels", code_size=mul, max_size=256, subset=False)
subset = TritonKernel("triton_kernels", code_size=comb, max_size=128, subset=True)
categorical = TritonKernel("triton_categorical", code_size=comb, max_size=32)
