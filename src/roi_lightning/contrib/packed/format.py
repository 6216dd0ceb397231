"""The packed format of a 2:4 matrix: kept weights and two-bit indices, 9/16 of the bytes of 16-bit weights.

With kept weights in int8 it is 5/16 of them, and four bytes a row.
"""

from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern

PATTERN: Final = NMPattern("2:4")
# Indices, two bits each, in one byte.
_IN_A_BYTE: Final = 4
# The largest int8 weight; -128 is not used, so that both signs reach as far.
_MOST: Final = 127


class Packed(NamedTuple):
    """One matrix.

    Attributes:
        values: The kept weights [out, in / 2] of the matrix's dtype, or int8, in the order of their inputs.
        indices: uint8 [out, ceil(in / 8)], four indices a byte, two bits each, lowest bits first: which of the four
            inputs of its group a kept weight belongs to. Bits past the last kept weight are 0.
        scales: fp32 [out], what a row's int8 values are multiplied by; None where values are no int8.
    """

    values: Tensor
    indices: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that are there."""
        return tuple(part for part in self if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(part.nbytes for part in self.parts)


def pack(weight: Tensor, mask: Tensor | None = None, name: str = "the weight") -> Packed:
    """Pack a matrix.

    Args:
        weight: [out, in], any dtype, on any device; zero wherever it is not kept.
        mask: Boolean [out, in], two of every four inputs, where it is known; else what is not zero is kept, and in a
            group with more zeros than two the first of them too.
        name: For the error.

    Raises:
        UserError: If the inputs do not come in fours, a group has more than two weights that are not zero, or the
            mask keeps other than two of a group or not all that is not zero.
    """
    if weight.ndim != 2:
        raise UserError(f"{name} has {weight.ndim} dimensions; only matrices [out, in] can be packed")
    PATTERN.check(weight.shape[1], name)
    nonzero = weight != 0
    kept = PATTERN.top(nonzero.byte()) if mask is None else mask
    if not PATTERN.holds(kept) or (nonzero & ~kept).any():
        raise UserError(f"{name} is not {PATTERN} sparse: only {PATTERN} matrices can be packed")
    rows, columns = weight.shape
    values = weight[kept].view(rows, columns // 2)
    index = torch.arange(4, dtype=torch.uint8, device=weight.device).repeat(columns // 4)
    return Packed(values, _to_bytes(index.expand_as(weight)[kept].view(rows, columns // 2)))


def empty_packed(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Packed:
    """A matrix (out, in) of no content yet, its kept weights of `dtype`.

    Raises:
        UserError: If the inputs do not come in fours.
    """
    PATTERN.check(shape[1], "the weight")
    rows, kept = shape[0], shape[1] // 2
    indices = torch.empty(rows, -(-kept // _IN_A_BYTE), dtype=torch.uint8, device=device)
    scales = torch.empty(rows, dtype=torch.float32, device=device) if dtype == torch.int8 else None
    return Packed(torch.empty(rows, kept, dtype=dtype, device=device), indices, scales)


def quantize(packed: Packed) -> Packed:
    """The same matrix in int8: each kept weight as the nearest multiple of its row's scale, ties to even.

    A row's scale is its largest absolute weight / 127, so that no weight moves by more than half of it.

    Args:
        packed: Of floating-point weights.
    """
    values = packed.values.float()
    # A row of zeros has a scale, too, and none is subnormal.
    scales = (values.abs().amax(1) / _MOST).clamp(min=torch.finfo(torch.float32).tiny)
    return Packed((values / scales[:, None]).round().to(torch.int8), packed.indices, scales)


def is_near(packed: Packed, weight: Tensor) -> bool:
    """Whether int8 weights are as near to a matrix [out, in] as `quantize` brings them: zero where it is zero."""
    steps = (weight.float() - unpack(packed)).abs() / cast(Tensor, packed.scales)[:, None]
    # Half a step, and what fp32 rounds: up to 2^-18 of a step by dividing, 2^-17 by multiplying again, and here.
    return bool((steps <= 0.5 + 2**-16).all())


def unpack(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix again, [out, in], zeros where nothing was kept.

    Args:
        packed: The matrix.
        dtype: What int8 weights times their scales are rounded to; others come in their own.
    """
    values = packed.values
    if packed.scales is not None:
        values = (values * packed.scales[:, None]).to(dtype)
    return values.new_zeros(packed.shape).scatter_(1, kept_inputs(packed), values)


def kept_inputs(packed: Packed) -> Tensor:
    """The input that each kept weight belongs to: int64 [out, in / 2]."""
    kept = packed.values.shape[1]
    start = torch.arange(kept, device=packed.values.device) // 2 * 4
    return start + _from_bytes(packed.indices, kept)


def check_indices(packed: Packed, name: str = "the weight") -> None:
    """Refuse bytes that no packing made.

    Raises:
        UserError: If the tensors are not of one matrix, the indices of a group do not rise, or a scale is no
            positive number.
    """
    rows, kept = packed.values.shape
    if packed.indices.dtype != torch.uint8 or tuple(packed.indices.shape) != (rows, -(-kept // _IN_A_BYTE)):
        raise UserError(
            f"{name}: {kept} kept weights in {rows} rows do not fit {list(packed.indices.shape)} indices"
        )
    pairs = _from_bytes(packed.indices, kept).view(rows, -1, 2)
    if not (pairs[..., 0] < pairs[..., 1]).all():
        raise UserError(f"{name}: the indices of a group do not rise; the file is damaged")
    if (scales := packed.scales) is not None:
        if (packed.values.dtype, scales.dtype, [*scales.shape]) != (torch.int8, torch.float32, [rows]):
            raise UserError(
                f"{name}: {packed.values.dtype} in {rows} rows and {[*scales.shape]} scales do not fit"
            )
        if not ((scales > 0) & scales.isfinite()).all():
            raise UserError(f"{name}: a scale is no positive number; the file is damaged")


def _to_bytes(indices: Tensor) -> Tensor:
    rows, kept = indices.shape
    full = torch.nn.functional.pad(indices, (0, -kept % _IN_A_BYTE)).view(rows, -1, _IN_A_BYTE)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=indices.device)
    return (full << shifts).sum(-1, dtype=torch.uint8)


def _from_bytes(packed: Tensor, kept: int) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 3).flatten(1)[:, :kept].long()
