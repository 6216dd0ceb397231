"""The mask of one tensor at one bit per weight, in the layout of the mask file."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from roi_lightning.errors import UserError


@dataclass(frozen=True, eq=False)
class LayerMask:
    """One tensor's mask, packed.

    Attributes:
        packed: uint8 [out, ceil(in / 8)]: bit b of byte j is input 8j + b, the lowest bit first; 1 = kept.
            Bits past the last input are 0.
        shape: (out, in).
        transposed: Whether the tensor on disk is [in, out] (GPT-2's `Conv1D`).

    Raises:
        UserError: If the bytes do not fit the shape.
    """

    packed: Tensor
    shape: tuple[int, int]
    transposed: bool

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if rows < 1 or columns < 1:
            raise UserError(f"a mask of [{rows}, {columns}] covers no weight")
        expected = (rows, -(-columns // 8))
        if self.packed.dtype != torch.uint8 or tuple(self.packed.shape) != expected:
            raise UserError(
                f"a packed mask of [{rows}, {columns}] is uint8 {list(expected)}, "
                f"not {self.packed.dtype} {list(self.packed.shape)}"
            )
        if columns % 8 and (self.packed[:, -1] >> columns % 8).any():
            raise UserError(f"a packed mask of [{rows}, {columns}] has bits past its last input")

    @classmethod
    def from_rows(cls, mask: Tensor, transposed: bool = False) -> Self:
        """Pack a boolean mask [out, in], whatever the orientation of the tensor on disk."""
        rows = mask.detach().cpu().numpy()
        packed = torch.from_numpy(np.packbits(rows, axis=-1, bitorder="little"))
        return cls(packed, (rows.shape[0], rows.shape[1]), transposed)

    @property
    def stored_shape(self) -> tuple[int, int]:
        """The shape of the tensor on disk."""
        return (self.shape[1], self.shape[0]) if self.transposed else self.shape

    @property
    def kept(self) -> int:
        """How many weights stay."""
        return _count(self.packed.numpy())

    def kept_with(self, other: Self) -> int:
        """How many weights both this mask and another of the same shape keep."""
        return _count(self.packed.numpy() & other.packed.numpy())

    @property
    def total(self) -> int:
        """How many weights there are."""
        return self.shape[0] * self.shape[1]

    def to_bool(self) -> Tensor:
        """Boolean mask in the orientation of the tensor on disk."""
        return self.to_rows().T.contiguous() if self.transposed else self.to_rows()

    def to_rows(self) -> Tensor:
        """Boolean mask [out, in], whatever the orientation of the tensor on disk."""
        bits = np.unpackbits(self.packed.numpy(), axis=-1, count=self.shape[1], bitorder="little")
        return torch.from_numpy(bits).bool()


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """Boolean [out, columns] of `LayerMask.packed`, on its device."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(1)
    return bits.flatten(1)[:, :columns].bool()


def _count(packed: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> int:
    return int(np.bitwise_count(packed).sum(dtype=np.int64))
