"""Tensors put away on the disk, one file each, so that a whole model's worth of them needs no memory."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from roi_lightning.atomic import temporary_name
from roi_lightning.errors import UserError

_KEY = "tensor"


class TensorStore(Mapping[str, Tensor]):
    """Tensors by name, read back from their files whenever asked for.

    Args:
        folder: An existing, empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}

    @classmethod
    @contextmanager
    def beside(cls, path: Path) -> Iterator[Self]:
        """A store in a hidden folder next to `path`, on the same disk, that is gone when the block ends.

        Raises:
            UserError: If the folder can't be made.
        """
        try:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=temporary_name(path))
        except OSError as error:
            raise UserError(
                f"{str(path)!r} can't be written: {error}; make room or choose another place"
            ) from error
        with folder as name:
            yield cls(Path(name))

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor.

        Raises:
            UserError: If the disk refuses.
        """
        file = self._folder / f"{len(self._files)}.safetensors"
        try:
            save_file({_KEY: tensor.detach().cpu().contiguous()}, file)
        except Exception as error:  # safetensors raises errors of its own beside OSError
            raise UserError(
                f"{str(file)!r} can't be written: {error}; make room or choose another place"
            ) from error
        self._files[name] = file

    @override
    def __getitem__(self, name: str) -> Tensor:
        return load_file(self._files[name])[_KEY]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    @override
    def __len__(self) -> int:
        return len(self._files)
