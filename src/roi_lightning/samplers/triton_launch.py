"""The samplers' passes over tensors on NVIDIA GPUs, through Triton's kernels, where Triton is installed."""

import logging
from typing import Final

import torch
from torch import Tensor

from roi_lightning.samplers.base import Draw, Kernel, on_device
from roi_lightning.utils.cpp_extension import FastPath

kernels = FastPath("Triton's kernels can't be used here", logging.INFO)
# Beyond, compiling would take minutes.
_MAX_SIZES: Final = {"gumbel_top_k": 256, "gumbel_subset": 128, "categorical": 32}
# Threads of a program.
_THREADS: Final = 128


def attempt(kernel: Kernel, name: str, tensors: tuple[Tensor, ...], draw: Draw) -> bool:
    """Run one pass of a sampler as one launch, if that can be done; see `cpu_kernels.attempt`."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    device, groups = tensors[1].device, tensors[1].numel() // kernel.pattern.m
    if not groups or kernel.size > _MAX_SIZES[kernel.name]:
        return False

    def launch() -> None:
        # Here, since machines without a GPU may lack Triton.
        from roi_lightning.samplers import triton_kernels

        numbers = draw.numbers if draw.numbers is not None else on_device([draw], device)[0].numbers
        fixed = constants(kernel)
        programs = -(-groups // int(fixed["TILE"]))
        with torch.cuda.device_of(tensors[1]):
            getattr(triton_kernels, name)[programs,](*tensors, numbers, groups, draw.first, **fixed)

    return kernels.attempt(launch)


def constants(kernel: Kernel) -> dict[str, str | int]:
    """What the kernels are compiled for."""
    width = 1 << (kernel.pattern.m - 1).bit_length()
    # Sums of many candidates fill the registers of a thread that has eight weights.
    weights = 1 if kernel.name == "gumbel_subset" and kernel.size > 16 else 8
    tile = max(1, weights * _THREADS // width)
    sizes = {"M": kernel.pattern.m, "N": kernel.pattern.n, "WIDTH": width, "TILE": tile}
    return {"KIND": kernel.name, "HARD": kernel.hard, "SCALED": kernel.scaled, **sizes}
