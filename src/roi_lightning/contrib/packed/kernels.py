"""Small-batch products on CPUs, by the C++ kernels in `cpp/matmul.cpp`.

Decoding reads every weight once for each token and is bound by memory: of a packed matrix nine bytes are read where a
dense one has sixteen, both nearly at the memory's bandwidth; in int8, five. Products are summed in fp32 in an order
that the source states, and rounded once.
"""

import ctypes
import logging
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.contrib.packed import format
from roi_lightning.utils.cpp_extension import Build, FastPath, load, openmp, threads_for

kernels = FastPath(
    "packed layers run many times slower: their C++ kernels can't be compiled here", logging.WARNING
)
_SOURCE: Final = Path(__file__).with_name("cpp") / "matmul.cpp"
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Bytes of a matrix that are worth another thread.
_MIN_BYTES: Final = 1 << 16
# Parts of a matrix for each thread, so that others take over from one that is delayed.
_PARTS: Final = 2
# The source's `Call`, what changes and what stays: ctypes takes microseconds over as many arguments.
_HEAD: Final = Struct("=7q")
_REST: Final = Struct("=7q")


def multiply(
    x: Tensor, values: Tensor, indices: Tensor, scales: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Multiply rows by a packed matrix's transpose and add a bias; no gradient.

    Args:
        x: [..., in], of the matrix's dtype unless that is int8, on the CPU.
        values: See `Packed`; contiguous.
        indices: See `Packed`; contiguous.
        scales: See `Packed`; contiguous.
        bias: [out] or None.

    Returns:
        [..., out] of the same dtype; None if this machine can't compile the kernel.

    Raises:
        MemoryError: If there is no memory for the rows in fp32.
    """
    library = _library(x.dtype, scales is not None)
    if library is None:
        return None
    scales_at = 0 if scales is None else scales.data_ptr()
    return _multiply(library.multiply_packed, x, values, indices.data_ptr(), scales_at, bias)


def multiply_dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The same with a dense matrix [out, in], contiguous."""
    library = _library(weight.dtype)
    return None if library is None else _multiply(library.multiply_dense, x, weight, 0, 0, bias)


def unpack(
    values: Tensor, indices: Tensor, scales: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A packed matrix written out, [out, in]; see `format.unpack`."""
    if scales is None:
        dtype = values.dtype
    library = _library(dtype, scales is not None) if values.is_cpu else None
    if library is None:
        return format.unpack(format.Packed(values, indices, scales), dtype)
    outputs, kept = values.shape
    dense = values.new_empty((outputs, 2 * kept), dtype=dtype)
    scales_at = 0 if scales is None else scales.data_ptr()
    head = _HEAD.pack(0, 0, values.data_ptr(), indices.data_ptr(), scales_at, 0, dense.data_ptr())
    _run(library.unpack_packed, head, outputs, kept, values.itemsize)
    return dense


def _multiply(
    kernel: Any, x: Tensor, weights: Tensor, indices_at: int, scales_at: int, bias: Tensor | None
) -> Tensor:
    outputs, kept = weights.shape
    shape = [*x.shape]
    inputs, shape[-1] = shape[-1], outputs
    x = x.contiguous()
    y = x.new_empty(shape)
    bias_at = 0 if bias is None else bias.data_ptr()
    rows = x.numel() // inputs
    head = _HEAD.pack(x.data_ptr(), rows, weights.data_ptr(), indices_at, scales_at, bias_at, y.data_ptr())
    _run(kernel, head, outputs, kept, weights.itemsize)
    return y


def _run(kernel: Any, head: bytes, outputs: int, kept: int, itemsize: int) -> None:
    """Call a kernel in torch's threads."""
    entry = openmp()
    if kernel(head + _rest(outputs, kept, itemsize, entry, torch.get_num_threads() if entry else 1)):
        raise MemoryError("no memory for the rows in fp32")


@lru_cache(maxsize=4096)
def _rest(outputs: int, kept: int, itemsize: int, entry: int, available: int) -> bytes:
    threads = threads_for(outputs, _min_lines(kept, itemsize), available)
    return _REST.pack(outputs, kept, 0, outputs, -(-outputs // (threads * _PARTS)), entry, threads)


def _min_lines(kept: int, itemsize: int) -> int:
    """Lines of a matrix that are worth another thread."""
    return _MIN_BYTES // (kept * itemsize + kept // 4) or 1


@cache
def _library(dtype: torch.dtype, int8: bool = False) -> Any | None:
    """The compiled functions for a model of a dtype, its weights in it or in int8; None if there can be none."""
    if dtype not in DTYPES:
        return None
    build = Build(_SOURCE, (("WEIGHT", DTYPES[dtype]), *([("INT8", 1)] if int8 else [])))
    if not kernels.attempt(lambda: load(build)):
        return None
    library = load(build)
    for name in ("multiply_packed", "unpack_packed", *([] if int8 else ["multiply_dense"])):
        getattr(library, name).argtypes = (ctypes.c_char_p,)
    return library
