"""Launch the kernels in `triton_kernels`, each tuned to a matrix's shape when it is first multiplied."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.runtime.packed_format import Packed

# Rows that `few_rows` and one tile take at most: more do not fit the registers.
MAX_FEW: Final = 8
_MAX_TILE: Final = 64
_MIN_TILE: Final = 16  # the fewest that tensor cores multiply
# Kept weights whose indices fill a word.
_WORD: Final = 8
# Constants, warps and stages to try.
CONFIGS: Final[dict[str, tuple[tuple[dict[str, int], int, int], ...]]] = {
    "few_rows": (
        ({"LINES": 1, "WORDS": 64}, 2, 1),
        ({"LINES": 1, "WORDS": 128}, 4, 1),
        ({"LINES": 2, "WORDS": 64}, 4, 2),
        ({"LINES": 2, "WORDS": 128}, 4, 1),
        ({"LINES": 4, "WORDS": 64}, 4, 2),
        ({"LINES": 4, "WORDS": 32}, 4, 3),
        ({"LINES": 8, "WORDS": 32}, 8, 2),
    ),
    "tiles": (
        ({"LINES": 16, "GROUPS": 32}, 4, 3),
        ({"LINES": 32, "GROUPS": 32}, 4, 3),
        ({"LINES": 64, "GROUPS": 16}, 4, 4),
        ({"LINES": 64, "GROUPS": 32}, 8, 3),
        ({"LINES": 128, "GROUPS": 16}, 8, 3),
    ),
    "unpacked": (({"LINES": 8, "GROUPS": 64}, 4, 1), ({"LINES": 4, "GROUPS": 256}, 8, 1)),
}
_Grid = Callable[[dict[str, int]], tuple[int, ...]]


def takes_few(packed: Packed) -> bool:
    """Whether `few_rows` can read a matrix: its indices come in whole words."""
    return packed.values.shape[1] % _WORD == 0


def few_rows(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """At most `MAX_FEW` rows [rows, in] times a matrix's transpose, plus a bias: [rows, out]."""
    words = packed.indices.view(torch.int16)
    rows = 1 << (len(x) - 1).bit_length()
    return _product("few_rows", x, packed._replace(indices=words), bias, rows, lambda lines: (lines,))


def tiles(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Rows [rows, in] times a matrix's transpose, plus a bias: [rows, out]; on tensor cores."""
    rows = min(_MAX_TILE, max(_MIN_TILE, 1 << (len(x) - 1).bit_length()))
    return _product("tiles", x, packed, bias, rows, lambda lines: (lines, -(-len(x) // rows)))


def unpacked(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [out, in], as `unpack` makes it."""
    values, indices, scales = packed
    (outputs, inputs), kept = packed.shape, values.shape[1]
    y = values.new_empty(outputs, inputs, dtype=values.dtype if scales is None else dtype)
    _launch(
        "unpacked",
        lambda meta: (-(-outputs // meta["LINES"]), -(-inputs // (4 * meta["GROUPS"]))),
        *(values, indices, values if scales is None else scales, y, outputs, kept),
        SCALED=scales is not None,
    )
    return y


def _product(
    kernel: str,
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    rows: int,
    grid: Callable[[int], tuple[int, ...]],
) -> Tensor:
    values, indices, scales = packed
    outputs, kept = values.shape
    y = x.new_empty(len(x), outputs)
    _launch(
        kernel,
        lambda meta: grid(-(-outputs // meta["LINES"])),
        *(x.contiguous(), values, indices, values if scales is None else scales),
        *(values if bias is None else bias, y, len(x), outputs, kept),
        SCALED=scales is not None,
        BIASED=bias is not None,
        ROWS=rows,
    )
    return y


def _launch(kernel: str, grid: _Grid, first: Tensor, *others: Tensor | int, **constants: int) -> None:
    with torch.cuda.device_of(first):
        _tuned(kernel)[grid](first, *others, **constants)


@cache
def _tuned(name: str) -> Any:
    # Imported when first needed: machines without a GPU may lack Triton.
    triton = importlib.import_module("triton")
    kernel = getattr(importlib.import_module("roi_lightning.runtime.triton_kernels"), name)
    configs = [
        triton.Config(sizes, num_warps=warps, num_stages=stages) for sizes, warps, stages in CONFIGS[name]
    ]
    key = [argument for argument in ("outputs", "kept", "ROWS") if argument in kernel.arg_names]
    return triton.autotune(configs, key=key)(kernel)
