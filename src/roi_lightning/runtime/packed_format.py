"""The packed format of a 2:4 matrix: kept weights and two-bit indices, 9/16 of the bytes of 16-bit weights."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern

PATTERN: Final = NMPattern("2:4")
# Indices, two bits each, in one byte.
_IN_A_BYTE: Final = 4


class Packed(NamedTuple):
    """One matrix.

    Attributes:
        values: The kept weights [out, in / 2] of the matrix's dtype, in the order of their inputs.
        indices: uint8 [out, ceil(in / 8)], four indices a byte, two bits each, lowest bits first: which of the four
            inputs of its group a kept weight belongs to. Bits past the last kept weight are 0.
    """

    values: Tensor
    indices: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.values.nbytes + self.indices.nbytes


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


def unpack(packed: Packed) -> Tensor:
    """The matrix again, [out, in], zeros where nothing was kept."""
    rows, columns = packed.shape
    weight = packed.values.new_zeros(rows, columns)
    return weight.scatter_(1, kept_inputs(packed), packed.values)


def kept_inputs(packed: Packed) -> Tensor:
    """The input that each kept weight belongs to: int64 [out, in / 2]."""
    kept = packed.values.shape[1]
    start = torch.arange(kept, device=packed.values.device) // 2 * 4
    return start + _from_bytes(packed.indices, kept)


def check_indices(packed: Packed, name: str = "the weight") -> None:
    """Refuse bytes that no packing made.

    Raises:
        UserError: If the two are not of one matrix, or the indices of a group do not rise.
    """
    rows, kept = packed.values.shape
    if packed.indices.dtype != torch.uint8 or tuple(packed.indices.shape) != (rows, -(-kept // _IN_A_BYTE)):
        raise UserError(
            f"{name}: {kept} kept weights in {rows} rows do not fit {list(packed.indices.shape)} indices"
        )
    pairs = _from_bytes(packed.indices, kept).view(rows, -1, 2)
    if not (pairs[..., 0] < pairs[..., 1]).all():
        raise UserError(f"{name}: the indices of a group do not rise; the file is damaged")


def _to_bytes(indices: Tensor) -> Tensor:
    rows, kept = indices.shape
    full = torch.nn.functional.pad(indices, (0, -kept % _IN_A_BYTE)).view(rows, -1, _IN_A_BYTE)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=indices.device)
    return (full << shifts).sum(-1, dtype=torch.uint8)


def _from_bytes(packed: Tensor, kept: int) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 3).flatten(1)[:, :kept].long()
