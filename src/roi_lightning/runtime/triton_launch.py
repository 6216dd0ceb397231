"""Launch the kernels in `triton_kernels`, each tuned to a matrix's shape when it is first multiplied."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.runtime.packed_format import Packed

# Rows that `few_rows` takes; for more, an H200 was quicker to write the matrix out (benchmarks/results/h200.md).
MAX_FEW: Final = 4
# Kept weights whose indices fill a word.
_WORD: Final = 8
# Constants, warps and stages: those of `few_rows` are the ones that an H200 chose, by shape and rows.
CONFIGS: Final[dict[str, tuple[tuple[dict[str, int], int, int], ...]]] = {
    "few_rows": (
        ({"LINES": 2, "WORDS": 64}, 4, 2),
        ({"LINES": 2, "WORDS": 128}, 4, 1),
        ({"LINES": 4, "WORDS": 64}, 4, 2),
        ({"LINES": 4, "WORDS": 32}, 4, 3),
    ),
    "unpacked": (({"LINES": 8, "GROUPS": 64}, 4, 1),),
}
_Grid = Callable[[dict[str, int]], tuple[int, ...]]


def takes_few(packed: Packed) -> bool:
    """Whether `few_rows` can read a matrix: its indices come in whole words."""
    return packed.values.shape[1] % _WORD == 0


def few_rows(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """At most `MAX_FEW` rows [rows, in] times a matrix's transpose, plus a bias: [rows, out]."""
    values, indices, scales = packed
    outputs, kept = values.shape
    y = x.new_empty(len(x), outputs)
    _launch(
        "few_rows",
        lambda meta: (-(-outputs // meta["LINES"]),),
        *(x.contiguous(), values, indices.view(torch.int16), values if scales is None else scales),
        *(values if bias is None else bias, y, len(x), outputs, kept),
        SCALED=scales is not None,
        BIASED=bias is not None,
        ROWS=1 << (len(x) - 1).bit_length(),
    )
    return y


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
