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
    """The tensors of a directory's safetensors files, read one at a time: of exactly those that transformers reads.

    Args:
        directory: Holds `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
        UserError: If there are no safetensors files, the index is not of what they hold, or others could be meant: by
            a single file beside an index, an adapter, an entry in `config.json`.
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
    index, config = directory / INDEX, directory / "config.json"
    listed = _listed(index) if index.is_file() else {}
    files = sorted(set(listed.values())) or [WEIGHTS]
    named = str(read_json(config).get("transformers_weights")) if config.is_file() else WEIGHTS
    for other in sorted({"adapter_config.json", WEIGHTS, named}.difference(files)):
        if (directory / other).is_file():
            raise UserError(
                f"{str(directory)!r} holds {other!r} beside {files[0]!r}, and transformers reads it (a whole file, "
                "an adapter, or config.json's transformers_weights); remove what is not the model"
            )
    held = [(name, file) for file in files for name in _names(directory, file)]
    if listed and (wrong := listed.items() ^ set(held)):
        name, file = min(wrong)
        raise UserError(f"the index and {str(directory / file)!r} differ in {name!r}; fetch the model again")
    return listed or dict(held)


def _listed(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{str(index)!r} can't be read (it names no files); fetch the model again")
    return weight_map


def own_file(path: Path, directory: Path) -> Path:
    """A path in a directory; a link may lead to another file there, or to a blob of the hub's cache.

    Raises:
        UserError: If it leads elsewhere: nothing from outside may get into an export.
    """
    home = directory.resolve()
    blobs = next((above.parent / "blobs" for above in home.parents if above.name == "snapshots"), home)
    if not any(path.resolve().is_relative_to(place) for place in (home, blobs)):
        raise UserError(f"{str(path)!r} is a link out of the directory; move the file itself there")
    return path


def _names(directory: Path, file: str) -> list[str]:
    """The names of a file's tensors, in its order."""
    path = directory / file
    if path.name != file or not path.is_file():
        raise UserError(
            f"{str(directory)!r} holds no {file}; only safetensors are read: fetch the model again, or convert "
            "it with save_pretrained first"
        )
    try:
        with safe_open(own_file(path, directory), framework="pt") as stored:
            return list(stored.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(path)!r} can't be read ({error}); fetch the model again") from error


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major, in its own dtype."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
