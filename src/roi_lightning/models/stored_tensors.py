"""The tensors of a model's safetensors files, as stored: export copies them, so it must not read a loaded module."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roi_lightning.errors import UserError

WEIGHTS: Final = "model.safetensors"
INDEX: Final = f"{WEIGHTS}.index.json"


class StoredTensors:
    """The tensors of a directory's safetensors files, read one at a time.

    Args:
        directory: Holds `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
        UserError: If there are no safetensors files or the index names one that is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[str, str] = _weight_map(directory)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.directory / self.files[name], framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        with safe_open(self.directory / self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def metadata(self, file_name: str) -> dict[str, str]:
        """The header metadata of one of the files."""
        with safe_open(self.directory / file_name, framework="pt") as file:
            return dict(file.metadata() or {})


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        UserError: If it can't be read or holds anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} can't be read ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} can't be read (it holds no JSON object); fetch the model again")
    return content


def _weight_map(directory: Path) -> dict[str, str]:
    single, index = directory / WEIGHTS, directory / INDEX
    if index.is_file():
        return _indexed(index)
    if not single.is_file():
        raise UserError(
            f"{str(directory)!r} holds no {single.name}; only safetensors are read: "
            "convert the model with save_pretrained first"
        )
    return dict.fromkeys(_names(single), single.name)


def _indexed(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{str(index)!r} can't be read (it names no files); fetch the model again")
    for file in sorted(set(weight_map.values())):
        path = index.parent / file
        if path.name != file or not path.is_file():
            raise UserError(f"{str(index)!r} names {file!r}, which is not there; fetch the model again")
        lost = {name for name, home in weight_map.items() if home == file}.difference(_names(path))
        if lost:
            raise UserError(f"{str(path)!r} lacks {min(lost)!r}, against the index; fetch the model again")
    return weight_map


def _names(path: Path) -> list[str]:
    """The names of a file's tensors, in its order."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(path)!r} can't be read ({error}); fetch the model again") from error


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major, in its own dtype."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
