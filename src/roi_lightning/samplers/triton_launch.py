"""RoI's passes over weights on NVIDIA GPUs, through `triton_kernels`, where Triton is installed."""

import importlib
import logging
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.samplers.base import DrawArgs
from roi_lightning.utils.cpp_extension import FastPath

kernels = FastPath("Triton's kernels can't be used here", logging.INFO)
# Weights of one program: eight for each of its threads.
_TILE: Final = 1024
# Code grows with elements times picks: beyond, compiling takes minutes.
_MAX_TERMS: Final = 256


def masked_weight(weight: Tensor, logits: Tensor, args: DrawArgs, out: Tensor) -> bool:
    """Write weight * mask into `out`; see `ops.Kernel`."""
    return _launch("masked_weight", args, logits, weight, out)


def logits_gradient(
    weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, args: DrawArgs, out: Tensor
) -> bool:
    """Write the gradient of the logits into `out`; see `ops.Kernel`."""
    return _launch("logits_gradient", args, logits, weight, grad, out, factor, KEPT_NORM=args.kept_norm)


def _launch(name: str, args: DrawArgs, *tensors: Tensor, **constants: bool) -> bool:
    if args.m * args.n > _MAX_TERMS:
        return False
    width = 1 << (args.m - 1).bit_length()
    tile, groups = max(1, _TILE // width), tensors[1].numel() // args.m
    numbers = groups, args.key0, args.key1, 1 / args.lam, 1 / args.tau, args.push
    fixed = {"M": args.m, "N": args.n, "WIDTH": width, "HARD": args.hard, "TILE": tile, **constants}

    def launch() -> None:
        with torch.cuda.device_of(tensors[1]):
            getattr(_module(), name)[-(-groups // tile),](*tensors, *numbers, **fixed)

    return kernels.attempt(launch)


@cache
def _module() -> Any:
    # Imported when first needed: it needs Triton, which machines without a GPU may lack.
    return importlib.import_module("roi_lightning.samplers.triton_kernels")
