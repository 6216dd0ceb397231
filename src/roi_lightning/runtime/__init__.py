"""Run 2:4 models packed: the format, its kernels for CPUs and GPUs, packed checkpoints.

Importing it teaches transformers to load and save packed models.
"""

from typing import Final

from roi_lightning.export.formats import DirectoryFormat
from roi_lightning.runtime.accelerate import Accelerated, accelerate
from roi_lightning.runtime.checkpoint import from_packed, verify_packed, write_packed
from roi_lightning.runtime.packed_format import Packed, pack, unpack
from roi_lightning.runtime.packed_linear import PackedLinear
from roi_lightning.runtime.prepare import refuse_saving

FORMAT: Final = DirectoryFormat(verify_packed, from_packed)

__all__ = [
    "FORMAT",
    "Accelerated",
    "Packed",
    "PackedLinear",
    "accelerate",
    "from_packed",
    "pack",
    "refuse_saving",
    "unpack",
    "verify_packed",
    "write_packed",
]
