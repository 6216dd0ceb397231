"""Training checkpoints: what marks them as ours, how they are written, and whether one belongs to a run."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from roi_lightning.atomic import written_aside
from roi_lightning.errors import UserError
from roi_lightning.pattern import NMPattern

_KEY: Final = "roi_lightning"
_MARGIN: Final = 1.02  # what a file holds besides its tensors


def mark_checkpoint(checkpoint: dict[str, Any], pattern: NMPattern, lm: str) -> None:
    """Note in a checkpoint which run it is of."""
    checkpoint[_KEY] = {"pattern": str(pattern), "lm": lm}


class PlainCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints aside and renames them, without a second copy in memory, and reads plain tensors only."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; until it is whole, whatever lies at `path` stays as it is.

        Raises:
            UserError: If the disk has no room for it or can't be written to.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        require_room(target, sum(tensor.nbytes for tensor in tensors_of(checkpoint)))
        with written_aside(target) as partial:
            try:
                torch.save(checkpoint, partial)
            except RuntimeError as error:  # what torch makes of a disk that refuses
                raise OSError(str(error)) from error

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint onto the CPU, by name: a function, as Lightning gives, is refused for 8-bit states."""
        return super().load_checkpoint(path, "cpu", weights_only=True)  # type: ignore[arg-type]


def require_room(path: Path, size: int) -> None:
    """Refuse to write a checkpoint for which the disk has no room.

    Args:
        path: Where it is to be.
        size: Its tensors, in bytes.

    Raises:
        UserError: Saying what is needed and what is free.
    """
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < size * _MARGIN:
        raise UserError(
            f"checkpoint {str(path)!r} needs {size * _MARGIN / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "make room and go on with --resume auto: earlier checkpoints are untouched"
        )


def tensors_of(tree: object) -> Iterator[Tensor]:
    """Every tensor in nested dictionaries, lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)


def check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint file that is missing, cannot be read as plain tensors, or is not one of ours.

    Args:
        path: The file, or None for no checkpoint.

    Raises:
        UserError: Naming the file and the remedy.
    """
    if path is None:
        return
    if not Path(path).is_file():
        raise UserError(f"no checkpoint at {path!r}; give a file from <run folder>/checkpoints/")
    try:
        loaded = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        raise UserError(f"checkpoint {path!r} can't be read: it is damaged or not one of ours") from error
    if not isinstance(loaded, dict) or _KEY not in loaded:
        raise UserError(
            f"checkpoint {path!r} was not written by roi_lightning; give one from a run's checkpoints/"
        )


def check_belongs(checkpoint: Mapping[str, Any], pattern: NMPattern, learned: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another pattern, model or choice of layers.

    Args:
        checkpoint: As loaded.
        pattern: Of this run.
        learned: This run's learned tensors by name.

    Raises:
        UserError: Naming what differs.
    """
    mark = checkpoint.get(_KEY)
    if mark is None:
        raise UserError("the checkpoint was not written by roi_lightning; give one from a run's checkpoints/")
    if mark["pattern"] != str(pattern):
        raise UserError(f"the checkpoint holds a {mark['pattern']} run, model.pattern is {pattern}")
    own = {name: tuple(value.shape) for name, value in learned.items()}
    theirs = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
    if own != theirs:
        name = min(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        raise UserError(
            f"the checkpoint is of another model or layer choice: {name!r} is {theirs.get(name)} there and "
            f"{own.get(name)} here (the checkpoint's model.lm is {mark['lm']!r})"
        )
