"""Products with packed matrices on GPUs: several ways, of which the quickest for so many rows is found by measuring.

Kernels read packed weights; beyond some number of rows it is quicker to write the dense matrix out for a moment and
leave the product to the vendor's library.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.fallible import Fallible
from roi_lightning.runtime.choice import Choice, Times, choose
from roi_lightning.runtime.packing import Packed, unpack
from roi_lightning.runtime.triton_products import MOST_FEW, few_rows, takes_few, tiles, unpacked

kernels = Fallible(
    "packed layers are unpacked again and again: Triton's kernels can't be used here", logging.WARNING
)
_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_REPEATS: Final = 9
_CACHE: Final = 1 << 28  # bytes, more than any GPU's cache holds
Product = Callable[[Tensor, Packed, Tensor | None], Tensor]
Run = Callable[[Tensor], object]
_choices: dict[tuple[tuple[int, int], torch.dtype, torch.device], Choice] = {}


def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply rows by a packed matrix's transpose and add a bias; no gradient.

    Args:
        x: [..., in], of the matrix's dtype and on its device.
        packed: The matrix, contiguous.
        bias: [out] or None.

    Returns:
        [..., out] of the same dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    way = choice_for(packed).way(len(rows)) if len(rows) else "plain"
    return WAYS[way](rows, packed, bias).view(*x.shape[:-1], packed.shape[0])


def choice_for(packed: Packed) -> Choice:
    """Which of `WAYS` for how many rows; measured for the first matrix of a shape and dtype on a device."""
    key = packed.shape, packed.values.dtype, packed.values.device

    def measure() -> None:
        runs = {name: partial(_on, packed, WAYS[name]) for name in _KERNELS}
        _choices[key] = choose(measured(runs, packed, {"few_rows": MOST_FEW if takes_few(packed) else 0}))

    if key not in _choices and not kernels.try_to(measure):
        _choices[key] = Choice((0,), ("plain",))
    return _choices[key]


def measured(runs: Mapping[str, Run], packed: Packed, most: Mapping[str, int]) -> Times:
    """Seconds of products with up to 2,048 rows, each as if the matrix had not been read for long.

    Args:
        runs: What multiplies rows [rows, in] with the matrix, by name.
        packed: The matrix.
        most: How many rows some of them can go.
    """
    cache = torch.empty(_CACHE, dtype=torch.uint8, device=packed.values.device)
    x = packed.values.new_ones(_COUNTS[-1], packed.shape[1])
    return {
        rows: {
            n: _seconds(partial(run, x[:rows]), cache) for n, run in runs.items() if rows <= most.get(n, rows)
        }
        for rows in _COUNTS
    }


def _seconds(run: Callable[[], object], cache: Tensor) -> float:
    run()  # compiles and tunes
    found: list[float] = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()  # the host is ahead meanwhile: what it takes to launch does not count
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return median(found)


def _on(packed: Packed, product: Product, x: Tensor) -> Tensor:
    return product(x, packed, None)


def _unpacked(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return F.linear(x, unpacked(packed), bias)


def _plain(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    return F.linear(x, unpack(packed), bias)


_KERNELS: Final = ("few_rows", "tiles", "unpacked")
WAYS: Final[dict[str, Product]] = {
    "few_rows": few_rows,
    "tiles": tiles,
    "unpacked": _unpacked,
    "plain": _plain,
}
