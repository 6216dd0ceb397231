"""The permutation file: the order of a model's hidden channels; and the base model's tensors in that order."""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.mask_set import BaseModel
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import BaseTensors, overwrite_tensors
from roi_lightning.utils.atomic_io import written_aside
from roi_lightning.utils.checksummed import read_checksummed, write_checksummed

PERMUTATION_FILE: Final = "roi_permutation.safetensors"
_REMEDY: Final = "give an intact directory of this version"
_HEADER: Final = {"format": "roi_lightning.permutation", "version": "1", "indices": "int32, little-endian"}


class ChannelOrder(NamedTuple):
    """How one tensor is reordered.

    Attributes:
        dim: Along which dimension of the tensor as stored.
        indices: int64 [size]; what is at place `i` was at place `indices[i]` of the base model's tensor.
    """

    dim: int
    indices: Tensor

    def same(self, other: "ChannelOrder") -> bool:
        """Whether two orders are equal."""
        return self.dim == other.dim and torch.equal(self.indices, other.indices)


@dataclass(frozen=True, eq=False)
class Permutation:
    """The order of a model's hidden channels.

    Attributes:
        pattern: The N:M that the order was chosen for.
        orders: Of every tensor that is reordered, by its name on disk.
        base: The model whose tensors these are; hashes exactly them, as they were.
    """

    pattern: NMPattern
    orders: dict[str, ChannelOrder]
    base: BaseModel

    def check(self) -> None:
        """Refuse what is no permutation.

        Raises:
            UserError: Naming the first tensor whose order leaves a channel out, or if the tensors are not those that
                have a hash.
        """
        if self.orders.keys() != self.base.sha256.keys():
            raise UserError("the reordered tensors are not the ones that have a hash of the base tensor")
        for name, (dim, index) in self.orders.items():
            if dim not in (0, 1) or not torch.equal(index.sort().values, torch.arange(len(index))):
                raise UserError(f"the order of {name} is no permutation of its channels")

    def reordered(self, name: str, tensor: Tensor) -> Tensor:
        """One of the base model's tensors with its channels in this order."""
        if name not in self.orders:
            return tensor
        return tensor.index_select(*self.orders[name])

    def save(self, path: Path) -> None:
        """Write the file: to a temporary path, then renamed.

        Raises:
            UserError: If it is no permutation or the file can't be written.
        """
        self.check()
        little_endian = {n: torch.from_numpy(x.indices.numpy().astype("<i4")) for n, x in self.orders.items()}
        header = _HEADER | {
            "pattern": str(self.pattern),
            "dims": json.dumps({name: order.dim for name, order in self.orders.items()}),
            "base_model": self.base.spec,
            "base_revision": self.base.revision or "",
            "dtype": self.base.dtype,
            "sha256": json.dumps(self.base.sha256),
            "package_version": importlib.metadata.version("roi-lightning"),
        }
        with written_aside(path) as partial:
            tensors = {name: index.view(torch.uint8) for name, index in little_endian.items()}
            write_checksummed(partial, tensors, header)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the permutation file of a directory.

        Raises:
            UserError: If it is no intact permutation file; the message names the path and the reason.
        """
        file = directory / PERMUTATION_FILE
        try:
            permutation = cls._parse(*read_checksummed(file))
            permutation.check()
        except UserError as error:
            raise UserError(f"permutation file {str(file)!r}: {error}; {_REMEDY}") from error
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
            reason = f"its header makes no sense ({error!r})"
            raise UserError(f"permutation file {str(file)!r}: {reason}; {_REMEDY}") from error
        return permutation

    @classmethod
    def _parse(cls, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> Self:
        for key, value in _HEADER.items():
            if header[key] != value:
                raise UserError(f"its {key} is {header[key]!r}; this version reads {value!r}")
        dims, hashes = json.loads(header["dims"]), json.loads(header["sha256"])
        if dims.keys() != tensors.keys():
            raise UserError("its header lists other tensors than it holds")
        indices = {name: torch.from_numpy(x.numpy().view("<i4")).long() for name, x in tensors.items()}
        base = BaseModel(header["base_model"], header["base_revision"] or None, header["dtype"], hashes)
        orders = {name: ChannelOrder(dims[name], indices[name]) for name in dims}
        return cls(NMPattern(header["pattern"]), orders, base)


class PermutedBase(BaseTensors):
    """A base model's tensors with their channels in another order; names, files and shapes stay.

    Args:
        base: The tensors as stored.
        permutation: Of exactly this model.
    """

    def __init__(self, base: BaseTensors, permutation: Permutation) -> None:
        self.source, self.files = base.source, base.files
        self._base, self._permutation = base, permutation

    @property
    @override
    def nbytes(self) -> int:
        return self._base.nbytes

    @override
    def __getitem__(self, name: str) -> Tensor:
        return self._permutation.reordered(name, self._base[name])

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    @override
    def write_weights(self, file_name: str, folder: Path) -> None:
        self._base.write_weights(file_name, folder)
        reordered = [name for name in self._permutation.orders if self.files[name] == file_name]
        overwrite_tensors(folder / file_name, {name: self[name] for name in reordered})

    @override
    def write_companions(self, folder: Path) -> None:
        self._base.write_companions(folder)
        self._permutation.save(folder / PERMUTATION_FILE)
