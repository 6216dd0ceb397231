"""Run 2:4 models packed: the format, its C++ kernels for CPUs, packed directories.

Importing it teaches transformers to load and save packed models.
"""

from typing import Final

from roi_lightning.contrib.packed.accelerate import Accelerated, accelerate
from roi_lightning.contrib.packed.format import Packed, pack, unpack
from roi_lightning.contrib.packed.linear import PackedLinear
from roi_lightning.contrib.packed.load import from_packed
from roi_lightning.contrib.packed.verify import verify_packed
from roi_lightning.contrib.packed.write import write_packed
from roi_lightning.export.formats import DirectoryFormat

FORMAT: Final = DirectoryFormat(verify_packed, from_packed)

__all__ = [
    "FORMAT",
    "Accelerated",
    "Packed",
    "PackedLinear",
    "accelerate",
    "from_packed",
    "pack",
    "unpack",
    "verify_packed",
    "write_packed",
]
