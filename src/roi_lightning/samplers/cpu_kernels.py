"""The samplers' C++ kernels for CPUs, compiled once per machine.

A sampler's passes are a hundred operations on every element, which is read once, kept in registers and written once.
`torch.compile` loads the elements of a group one by one and takes the exact logarithms of a library, twice the time
in all.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from operator import mul
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from roi_lightning.samplers.base import Inputs
from roi_lightning.utils.cpp_extension import Build, FastPath, load, share_out

kernels = FastPath("the samplers' C++ kernels can't be compiled here", logging.INFO)
SOURCES: Final = Path(__file__).with_name("cpp")
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Groups that one thread works on at least.
_MIN_GROUPS: Final = 1 << 13


class _Draw(ctypes.Structure):
    """The `Draw` of cpp/entries.hpp."""

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


@dataclass(frozen=True)
class CPUKernel:
    """The passes of one sampler; see `kernels.Kernel`.

    Attributes:
        source: The file in `cpp`.
        code_size: What the code grows with, by M and N.
        max_size: Beyond, compiling would take more than half a minute.
    """

    source: str
    code_size: Callable[[int, int], int]
    max_size: int

    def fill(self, inputs: Inputs, out: Tensor) -> bool:
        """Write weight * mask into `out`."""
        return self._run("masked_weight", inputs, out)

    def logits_gradient(self, inputs: Inputs, gradient: Tensor, out: Tensor) -> bool:
        """Write the gradient of the logits into `out`."""
        return self._run("logits_gradient", inputs, gradient, out)

    def build(self, m: int, n: int, dtype: torch.dtype) -> Build:
        """What to compile for a pattern, N kept of M, and the weights' dtype."""
        constants = {"M": m, "N": n, "C": comb(m, n), "WEIGHT": _DTYPES[dtype]}
        return Build(SOURCES / self.source, tuple(constants.items()))

    def _run(self, name: str, inputs: Inputs, *tensors: Tensor) -> bool:
        weight, pattern, draw = inputs.weight, inputs.pattern, inputs.draw
        if weight.dtype not in _DTYPES or self.code_size(pattern.m, pattern.n) > self.max_size:
            return False
        functions = library(self.build(pattern.m, pattern.n, weight.dtype))
        if functions is None:
            return False
        groups, inverse = weight.numel() // pattern.m, (1 / draw.lam, 1 / draw.tau)
        shared = _Draw(groups, draw.first, *draw.key, *inverse, inputs.push, inputs.hard)
        run(functions[name], (inputs.logits, weight, *tensors), shared)
        return True


def library(build: Build) -> ctypes.CDLL | None:
    """The compiled library; None if this machine can't make it."""
    return load(build) if kernels.attempt(lambda: load(build)) else None


def run(function: "ctypes._NamedFuncPointer", tensors: tuple[Tensor, ...], draw: _Draw) -> None:
    """Call a kernel on all groups, in as many threads as torch uses.

    Args:
        function: Of a library; takes the tensors' addresses, the first group, the one after the last, the draw,
            OpenMP's entry point or null, and the number of threads.
        tensors: Contiguous.
        draw: What all groups share.
    """
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]

    def work(start: int, end: int, openmp: int, threads: int) -> None:
        shared = ctypes.byref(draw), ctypes.c_void_p(openmp), threads
        function(*addresses, ctypes.c_int64(start), ctypes.c_int64(end), *shared)

    share_out(work, draw.groups, _MIN_GROUPS)


top_k = CPUKernel("gumbel_top_k.cpp", mul, 256)
categorical = CPUKernel("categorical.cpp", comb, 512)
subset = CPUKernel("gumbel_subset.cpp", comb, 512)
