"""Products with packed matrices on GPUs: a Triton kernel for a few rows, a dense copy for more."""

import logging
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.runtime.packed_format import Packed, unpack
from roi_lightning.runtime.triton_launch import MAX_FEW, few_rows, takes_few, unpacked
from roi_lightning.utils.cpp_extension import FastPath

kernels = FastPath(
    "packed layers are unpacked for every product: Triton's kernels can't be used here", logging.WARNING
)
_warm: set[tuple[tuple[int, int], torch.dtype, torch.dtype, torch.device]] = set()


def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply rows by a packed matrix's transpose and add a bias; no gradient.

    Args:
        x: [..., in], of the matrix's dtype unless that is int8, and on its device.
        packed: The matrix, contiguous.
        bias: [out] or None.

    Returns:
        [..., out] of the same dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    warm_up(packed, x.dtype)
    return KERNELS[kernel_for(packed, len(rows))](rows, packed, bias).view(*x.shape[:-1], packed.shape[0])


def kernel_for(packed: Packed, rows: int) -> str:
    """Which of `KERNELS` multiplies so many rows."""
    if kernels.disabled or rows == 0:
        return "plain"
    return "few_rows" if rows <= MAX_FEW and takes_few(packed) else "unpacked"


def warm_up(packed: Packed, dtype: torch.dtype) -> None:
    """Compile and tune the kernels for the first matrix of a shape and dtype on a device.

    Args:
        packed: The matrix.
        dtype: Of what it will multiply.
    """
    key = packed.shape, packed.values.dtype, dtype, packed.values.device
    if key not in _warm:
        _warm.add(key)
        kernels.attempt(lambda: _run_all(packed, dtype))


def _run_all(packed: Packed, dtype: torch.dtype) -> None:
    x = packed.values.new_ones(MAX_FEW + 1, packed.shape[1], dtype=dtype)
    for rows in (1, 2, MAX_FEW, MAX_FEW + 1):  # kernels are tuned for powers of two
        KERNELS[kernel_for(packed, rows)](x[:rows], packed, None)


def _unpacked(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return F.linear(x, unpacked(packed, x.dtype), bias)


def _plain(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return F.linear(x, unpack(packed, x.dtype), bias)


KERNELS: Final[dict[str, Callable[[Tensor, Packed, Tensor | None], Tensor]]] = {
    "few_rows": few_rows,
    "unpacked": _unpacked,
    "plain": _plain,
}
