"""A second packing of a layer for large batches, multiplied by the 2:4 tensor cores of NVIDIA GPUs."""

import warnings
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.errors import UserError
from roi_lightning.runtime.packed_format import Packed, unpack

_DTYPES: Final = (torch.float16, torch.bfloat16)
# What cuSPARSELt wants both sides of a matrix to be multiples of.
_MULTIPLE: Final = 16
# With 128 rows an H200 was quicker so than by a dense copy; from where on was not measured.
_MAX_SMALL_BATCH: Final = 64


@dataclass(frozen=True)
class SemiStructured:
    """A matrix as `torch.sparse` packs it, for inference only.

    Attributes:
        weight: [out, in], semi-structured.
    """

    weight: Tensor

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # nothing changes it

    def takes(self, x: Tensor) -> bool:
        """Whether rows [..., in] can be multiplied here, and probably faster."""
        if x.requires_grad and torch.is_grad_enabled():
            return False
        return x.numel() > _MAX_SMALL_BATCH * x.shape[-1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Rows [..., in] times the matrix's transpose, plus a bias: [..., out]."""
        return F.linear(x, self.weight, bias)


def check_device(device: torch.device) -> None:
    """Refuse devices without 2:4 tensor cores.

    Raises:
        UserError: If the device is no GPU of compute capability 8.0 or more, or the library for it is missing.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < (8, 0):
        raise UserError(
            f"large_batches needs a GPU of compute capability 8.0 or more, not {device}; leave it out"
        )
    if not torch.backends.cusparselt.is_available():
        raise UserError("large_batches needs cuSPARSELt, which this PyTorch was built without; leave it out")


def why_not(packed: Packed) -> str | None:
    """Why a matrix can't be packed for large batches, in words that fit others too; None if it can."""
    if packed.values.dtype not in _DTYPES:
        return f"the weight is {packed.values.dtype}"
    if any(side % _MULTIPLE for side in packed.shape):
        return f"{_MULTIPLE} does not divide both sides of the weight"
    return None


def pack_semi_structured(packed: Packed) -> SemiStructured:
    """Pack a matrix once more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*SparseSemiStructuredTensor is in prototype stage")
        return SemiStructured(torch.sparse.to_sparse_semi_structured(unpack(packed).contiguous()))
