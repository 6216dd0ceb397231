"""Products with packed matrices in Triton: y[r, o] = sum of values[o, k] * x[r, input of (o, k)] + bias[o].

Sums are taken in fp32 in an order that depends on the constants alone, and rounded once. Kept weights are half the
inputs; of eight of them two bytes hold the indices, of four one byte. SCALED ones are int8: a row's sum is multiplied
by the row's scale before the bias is added.
"""

import triton
import triton.language as tl


@triton.jit
def few_rows(
    x,
    values,
    words,
    scales,
    bias,
    y,
    rows,
    outputs,
    kept,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A few lines of the matrix times all rows, which are at most ROWS; `words` are eight indices each."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, 8)[None, None, :]
    total = tl.zeros((ROWS, LINES, WORDS, 8), tl.float32)
    for start in range(0, kept // 8, WORDS):
        word = start + tl.arange(0, WORDS)[None, :]
        here = (line < outputs)[:, None] & (word < kept // 8)
        indices = tl.load(words + line[:, None] * (kept // 8) + word, here, 0).to(tl.int32)
        at = word[:, :, None] * 8 + lane
        value = tl.load(values + line[:, None, None] * kept + at, here[:, :, None], 0).to(tl.float32)
        at = at // 2 * 4 + ((indices[:, :, None] >> (2 * lane)) & 3)
        there = here[None, :, :, None] & (row < rows)[:, None, None, None]
        mine = tl.load(x + row[:, None, None, None] * (2 * kept) + at[None], there, 0.0)
        total += value[None] * mine.to(tl.float32)
    sums = tl.sum(tl.sum(total, 3), 2)
    if SCALED:
        sums *= tl.load(scales + line, line < outputs, 0.0)[None, :]
    if BIASED:
        sums += tl.load(bias + line, line < outputs, 0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (line < outputs)[None, :]
    out = sums.to(y.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(y + row[:, None] * outputs + line[None, :], out, inside)


@triton.jit
def unpacked(
    values,
    indices,
    scales,
    y,
    outputs,
    kept,
    SCALED: tl.constexpr,
    LINES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The dense matrix."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    start = tl.program_id(1) * GROUPS
    at = start * 4 + tl.arange(0, 4 * GROUPS)
    inside = (line < outputs)[:, None] & (at < 2 * kept)[None, :]
    if SCALED:
        dense = _dense(values, indices, line, start, outputs, kept, tl.float32, LINES, GROUPS)
        dense *= tl.load(scales + line, line < outputs, 0.0)[:, None]
        dense = dense.to(y.dtype.element_ty, fp_downcast_rounding="rtne")
    else:
        dense = _dense(values, indices, line, start, outputs, kept, y.dtype.element_ty, LINES, GROUPS)
    tl.store(y + line[:, None] * (2 * kept) + at[None, :], dense, inside)


@triton.jit
def _dense(
    values,
    indices,
    line,
    start,
    outputs,
    kept,
    DTYPE: tl.constexpr,
    LINES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """[LINES, 4 * GROUPS] of the dense matrix in a dtype, from a group on; its scales are left out."""
    group = start + tl.arange(0, GROUPS)[None, :]
    here = (line < outputs)[:, None] & (group < kept // 2)
    pair = group[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    pairs = tl.load(values + line[:, None, None] * kept + pair, here[:, :, None], 0)
    first, second = tl.split(pairs.to(DTYPE))
    both = tl.load(indices + line[:, None] * ((kept + 3) // 4) + group // 2, here, 0).to(tl.int32)
    both = both >> (group % 2 * 4)
    slot = tl.arange(0, 4)[None, None, :]
    dense = tl.where(slot == ((both >> 2) & 3)[:, :, None], second[:, :, None], 0.0)
    dense = tl.where(slot == (both & 3)[:, :, None], first[:, :, None], dense)
    return tl.reshape(dense.to(DTYPE), (LINES, 4 * GROUPS))
