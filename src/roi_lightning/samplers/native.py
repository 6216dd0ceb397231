"""The samplers' loops for processors.

A sampler's passes over the weights are a hundred operations on every number, read once, kept in registers and written
once. `torch.compile` loads the members of a group one by one and takes the exact logarithms of a library, twice the
time in all.
"""

import ctypes
import logging
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from roi_lightning.fallible import Fallible
from roi_lightning.native import Recipe, load, share_out

loops = Fallible("the samplers' C++ loops can't be compiled here", logging.INFO)
SOURCES: Final = Path(__file__).with_name("cpp")
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
# Groups that one thread works on at least.
_LEAST_GROUPS: Final = 1 << 13
_LANES: Final = 16


def weight_type(weight: Tensor) -> int | None:
    """The number by which the sources know a weight's type; None if they don't."""
    return _DTYPES.get(weight.dtype)


def library(recipe: Recipe) -> ctypes.CDLL | None:
    """The compiled library; None if this machine can't make it, and then the caller takes a slower way."""
    return load(recipe) if loops.try_to(lambda: load(recipe)) else None


def run(
    function: "ctypes._NamedFuncPointer", tensors: tuple[Tensor, ...], groups: int, draw: ctypes.Structure
) -> None:
    """Call a kernel on all groups, in as many threads as torch uses.

    Args:
        function: Of a library; takes the tensors' addresses, the first group, the one after the last, the draw,
            OpenMP's entry point or null, and the number of threads.
        tensors: Contiguous.
        groups: How many.
        draw: What all groups share.
    """
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]

    def work(start: int, end: int, openmp: int, threads: int) -> None:
        shared = ctypes.byref(draw), ctypes.c_void_p(openmp), threads
        function(*addresses, ctypes.c_int64(start), ctypes.c_int64(end), *shared)

    share_out(work, groups, _LEAST_GROUPS, _LANES)
