"""The samplers' C++ kernels for CPUs, compiled once per machine.

A sampler's passes are a hundred operations on every element, which is read once, kept in registers and written once.
`torch.compile` loads the elements of a group one by one and takes the exact logarithms of a library, twice the time
in all.
"""

import ctypes
import logging
from math import comb
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers.base import Draw, Kernel
from roi_lightning.utils.cpp_extension import Build, FastPath, load, openmp, threads_for

kernels = FastPath("the samplers' C++ kernels can't be compiled here", logging.INFO)
SOURCES: Final = Path(__file__).with_name("cpp")
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Beyond, compiling would take more than half a minute.
_MAX_SIZES: Final = {"gumbel_top_k": 256, "gumbel_subset": 512, "categorical": 512}
# With fewer weights a tensor takes less time than starting compiled code is worth.
_MIN_WEIGHTS: Final = 1 << 16
# Groups that one thread works on at least.
_MIN_GROUPS: Final = 1 << 13


class _Draw(ctypes.Structure):
    """The `Draw` of cpp/memory.hpp."""

    _fields_: ClassVar = [
        ("groups", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("over_lam", ctypes.c_float),
        ("over_tau", ctypes.c_float),
        ("push", ctypes.c_float),
        ("hard", ctypes.c_int32),
    ]


def attempt(kernel: Kernel, name: str, tensors: tuple[Tensor, ...], draw: Draw) -> bool:
    """Run one pass of a sampler, if that can be done and is worth it; whether it was.

    Args:
        kernel: Of the sampler.
        name: `masked_weight` or `logits_gradient`.
        tensors: Contiguous: the logits, the weight, for a gradient that of the masked weight, and what is written.
        draw: The draw.
    """
    weight = tensors[1]
    if weight.numel() < _MIN_WEIGHTS or weight.dtype not in _DTYPES or kernel.size > _MAX_SIZES[kernel.name]:
        return False
    functions = library(build(kernel.name, kernel.pattern, weight.dtype))
    if functions is None:
        return False
    groups, push = weight.numel() // kernel.pattern.m, 1 / draw.tau if kernel.scaled else 1.0
    run(
        functions[name],
        tensors,
        _Draw(groups, draw.first, *draw.key, 1 / draw.lam, 1 / draw.tau, push, kernel.hard),
    )
    return True


def build(name: str, pattern: NMPattern, dtype: torch.dtype) -> Build:
    """What to compile for a pattern and the weights' dtype."""
    constants = {"M": pattern.m, "N": pattern.n, "C": comb(pattern.m, pattern.n), "WEIGHT": _DTYPES[dtype]}
    return Build(SOURCES / f"{name}.cpp", tuple(constants.items()))


def library(build: Build) -> ctypes.CDLL | None:
    """The compiled library; None if this machine can't make it."""
    return load(build) if kernels.attempt(lambda: load(build)) else None


def run(function: "ctypes._NamedFuncPointer", tensors: tuple[Tensor, ...], draw: _Draw) -> None:
    """Call a kernel on all groups, in as many threads as torch uses; in this one alone if torch has no OpenMP.

    Args:
        function: Of a library; takes the tensors' addresses, the first group, the one after the last, the draw,
            OpenMP's entry point or null, and the number of threads.
        tensors: Contiguous.
        draw: What all groups share.
    """
    assert all(tensor.is_contiguous() for tensor in tensors)
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    groups, threads = (ctypes.c_int64(0), ctypes.c_int64(draw.groups)), threads_for(draw.groups, _MIN_GROUPS)
    function(*addresses, *groups, ctypes.byref(draw), ctypes.c_void_p(openmp()), threads)
