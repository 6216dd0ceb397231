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

from roi_lightning.samplers.base import DrawArgs
from roi_lightning.utils.cpp_extension import FastPath

kernels = FastPath("Triton's kernels can't be used here", logging.INFO)
# Weights of one program: eight for each of its threads.
_TILE: Final = 1024


@dataclass(frozen=True)
class TritonKernel:
    """The passes of one sampler; see `dispatch.Kernel`.

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

    def masked_weight(self, weight: Tensor, logits: Tensor, args: DrawArgs, out: Tensor) -> bool:
        """Write weight * mask into `out`."""
        return self._launch("masked_weight", args, logits, weight, out)

    def logits_gradient(
        self, weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, args: DrawArgs, out: Tensor
    ) -> bool:
        """Write the gradient of the logits into `out`."""
        return self._launch(
            "logits_gradient", args, logits, weight, grad, out, factor, KEPT_NORM=args.kept_norm
        )

    def _launch(self, name: str, args: DrawArgs, *tensors: Tensor, **constants: bool) -> bool:
        if self.code_size(args.m, args.n) > self.max_size:
            return False
        width = 1 << (args.m - 1).bit_length()
        tile, groups = max(1, _TILE // width), tensors[1].numel() // args.m
        numbers: tuple[float, ...] = groups, args.key0, args.key1, 1 / args.lam, 1 / args.tau
        if self.subset is not None:
            numbers += (args.push,)
            constants |= {"HARD": args.hard, "SUBSET": self.subset}
        sizes = {"M": args.m, "N": args.n, "WIDTH": width, "TILE": tile}

        def launch() -> None:
            with torch.cuda.device_of(tensors[1]):
                getattr(_module(self.module), name)[-(-groups // tile),](
                    *tensors, *numbers, **sizes, **constants
                )

        return kernels.attempt(launch)


@cache
def _module(name: str) -> Any:
    # Imported when first needed: it needs Triton, which machines without a GPU may lack.
    return importlib.import_module(f"roi_lightning.samplers.{name}")


top_k = TritonKernel("triton_kernels", code_size=mul, max_size=256, subset=False)
subset = TritonKernel("triton_kernels", code_size=comb, max_size=128, subset=True)
categorical = TritonKernel("triton_categorical", code_size=comb, max_size=32)
