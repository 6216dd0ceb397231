"""Run 2:4 models in less memory: kept weights and two bits for the place of each."""

from roi_lightning.runtime.accelerate import Accelerated, accelerate, refuse_saving
from roi_lightning.runtime.packed_linear import PackedLinear
from roi_lightning.runtime.packing import Packed, pack, unpack

__all__ = ["Accelerated", "Packed", "PackedLinear", "accelerate", "pack", "refuse_saving", "unpack"]
