"""Products with packed matrices on processors, through the loop of `cpp/decode.cpp`.

Decoding reads every weight once for each token, and memory is what it waits for: here nine bytes are read where a
dense matrix has sixteen. Products are summed in fp32 in an order that the source states, and rounded once.
"""

import ctypes
import logging
from functools import cache, partial
from pathlib import Path
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.fallible import Fallible
from roi_lightning.native import Recipe, load, openmp, share_out, threads_for
from roi_lightning.runtime.packing import Packed

loops = Fallible(
    "packed layers run many times slower: their C++ loop can't be compiled here", logging.WARNING
)
_SOURCE: Final = Path(__file__).with_name("cpp") / "decode.cpp"
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Bytes of a matrix that a thread takes at a time, and those that are worth another thread.
_PART: Final = 1 << 15
_LEAST: Final = 1 << 16
# The source's `Call`; ctypes takes microseconds over as many arguments.
_CALL: Final = Struct("=13q")
_NO_MEMORY: Final = "no memory for the rows in fp32"


def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor | None:
    """Multiply rows by a packed matrix's transpose and add a bias; no gradient.

    Args:
        x: [..., in], of the matrix's dtype, on the CPU.
        packed: The matrix, contiguous.
        bias: [out] or None.

    Returns:
        [..., out] of the same dtype; None if this machine can't compile the loop, and the caller takes a slower way.
    """
    values, places = packed
    loop = _loop(values.dtype)
    if loop is None:
        return None
    outputs, kept = values.shape
    x = x.contiguous()
    rows, row_bytes = x.numel() // (2 * kept), kept * values.itemsize + places.shape[1]
    y = x.new_empty((*x.shape[:-1], outputs))
    if rows == 0:
        return y
    bias_at = 0 if bias is None else bias.data_ptr()
    tensors = x.data_ptr(), rows, values.data_ptr(), places.data_ptr(), bias_at, y.data_ptr()
    least, part = _LEAST // row_bytes or 1, _PART // row_bytes or 1
    if not openmp():
        share_out(partial(_call, loop, (*tensors, outputs, kept), part), outputs, least)
    elif loop(_CALL.pack(*tensors, outputs, kept, 0, outputs, part, openmp(), threads_for(outputs, least))):
        raise MemoryError(_NO_MEMORY)
    return y


def _call(
    loop: Any, head: tuple[int, ...], part: int, start: int, end: int, entry: int, threads: int
) -> None:
    if loop(_CALL.pack(*head, start, end, part, entry, threads)):
        raise MemoryError(_NO_MEMORY)


@cache
def _loop(dtype: torch.dtype) -> Any | None:
    """The compiled function for matrices of a dtype; None if there can be none."""
    recipe = Recipe(_SOURCE, (("WEIGHT", _DTYPES[dtype]),))
    if not loops.try_to(lambda: load(recipe)):
        return None
    loop = load(recipe).multiply_packed
    loop.argtypes = (ctypes.c_char_p,)
    return loop
