"""Training checkpoints: what marks them as ours, and whether one belongs to a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from roi_lightning.checkpoint_files import read_rest
from roi_lightning.errors import UserError
from roi_lightning.pattern import NMPattern

_KEY: Final = "roi_lightning"


def mark_checkpoint(checkpoint: dict[str, Any], pattern: NMPattern, lm: str) -> None:
    """Note in a checkpoint which run it is of."""
    checkpoint[_KEY] = {"pattern": str(pattern), "lm": lm}


def check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint file that is missing, cannot be read as plain tensors, or is not one of ours.

    Args:
        path: The file, or None for no checkpoint.

    Raises:
        UserError: Naming the file and the remedy.
    """
    if path is None:
        return
    if not Path(path).exists():
        raise UserError(f"no checkpoint at {path!r}; give one from <run folder>/checkpoints/")
    try:
        loaded = read_rest(Path(path))
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
