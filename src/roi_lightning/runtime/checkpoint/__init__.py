"""Packed 2:4 checkpoints on disk: written from an export, verified, and loaded without a dense copy."""

from roi_lightning.runtime.checkpoint.describe import PackedSizes
from roi_lightning.runtime.checkpoint.load import from_packed, open_packed
from roi_lightning.runtime.checkpoint.tensors import PackedTensors
from roi_lightning.runtime.checkpoint.verify import verify_packed
from roi_lightning.runtime.checkpoint.write import write_packed

__all__ = ["PackedSizes", "PackedTensors", "from_packed", "open_packed", "verify_packed", "write_packed"]
