"""What packing saves, in bytes on disk."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roi_lightning.export.base import StoredBase
from roi_lightning.runtime.checkpoint.tensors import PackedTensors


@dataclass(frozen=True)
class PackedSizes:
    """What packing saves.

    Attributes:
        layers: How many tensors were packed.
        linears: Their bytes before.
        packed: Their bytes after.
        before: Bytes of all files of the directory that was packed.
        after: Bytes of all files of the one that was written.
    """

    layers: int
    linears: int
    packed: int
    before: int
    after: int

    @property
    def ratio(self) -> float:
        """What remains of the bytes of the packed tensors."""
        return self.packed / self.linears

    def to_json(self) -> dict[str, Any]:
        """The sizes as JSON can hold them."""
        return asdict(self) | {"ratio": self.ratio}


def packed_sizes(base: StoredBase, packed: PackedTensors) -> PackedSizes:
    """The sizes of two directories.

    Args:
        base: The one that was packed.
        packed: What was made of it.
    """
    return PackedSizes(
        layers=len(packed.layers),
        linears=sum(base[name].nbytes for name in packed.layers),
        packed=sum(packed.packed(name).nbytes for name in packed.layers),
        before=_directory_bytes(base.directory),
        after=_directory_bytes(packed.directory),
    )


def _directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
