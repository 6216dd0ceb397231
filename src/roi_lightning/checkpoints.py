"""Training checkpoints: what marks them as ours, and whether one belongs to a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import safe_open
from torch import Tensor

from roi_lightning.checkpoint_files import read_rest, stored_files
from roi_lightning.errors import UserError
from roi_lightning.pattern import NMPattern
from roi_lightning.recipe import Recipe, check_same_run
from roi_lightning.shards import all_finite

_KEY: Final = "roi_lightning"


def mark_checkpoint(
    checkpoint: dict[str, Any], pattern: NMPattern, lm: str, recipe: Recipe, max_steps: int
) -> None:
    """Note in a checkpoint which run it is of."""
    checkpoint[_KEY] = {"pattern": str(pattern), "lm": lm, "recipe": recipe, "max_steps": max_steps}


def check_checkpoint(path: str) -> None:
    """Refuse a checkpoint that is missing, damaged, not plain tensors, or not one of ours.

    Args:
        path: The file or folder.

    Raises:
        UserError: Naming the file and the remedy.
    """
    _read_mark(path)
    if not all(map(_intact, stored_files(Path(path)))):
        raise UserError(f"checkpoint {path!r} is damaged; resume from another one in its folder")


def check_resumable(path: str, recipe: Recipe, max_steps: int) -> None:
    """Refuse a checkpoint that a run can't resume from, see `check_checkpoint`, or that is of another run.

    Args:
        path: The file or folder.
        recipe: Of the run.
        max_steps: Its optimizer steps, which may only grow.

    Raises:
        UserError: Naming the file, what differs, and the remedy.
    """
    mark = _read_mark(path)
    check_same_run(recipe, mark.get("recipe"), path)
    if max_steps < mark["max_steps"]:
        raise UserError(
            f"checkpoint {path!r} is of a run of {mark['max_steps']} optimizer steps, and trainer.max_steps is "
            f"{max_steps}; it may grow, or pass --allow_changed_settings if the change is meant"
        )
    check_checkpoint(path)


def stored_recipe(path: str) -> Recipe | None:
    """What a checkpoint was learned with; None if it does not say."""
    recipe: Recipe | None = _read_mark(path).get("recipe")
    return recipe


def _read_mark(path: str) -> dict[str, Any]:
    if not Path(path).exists():
        raise UserError(f"no checkpoint at {path!r}; give one from <run folder>/checkpoints/")
    try:
        loaded = read_rest(Path(path))
    except Exception as error:
        raise UserError(
            f"checkpoint {path!r} can't be read: it is damaged or not one of ours; give another from its folder"
        ) from error
    if not isinstance(loaded, dict) or not _is_ours(loaded):
        raise UserError(
            f"checkpoint {path!r} was not written by roi_lightning; give one from a run's checkpoints/"
        )
    mark: dict[str, Any] = loaded[_KEY]
    return mark


def _is_ours(loaded: dict[str, Any]) -> bool:
    mark, state = loaded.get(_KEY), loaded.get("state_dict")
    marked = isinstance(mark, dict) and mark.keys() >= {"pattern", "lm"} and "global_step" in loaded
    return marked and isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())


def _intact(file: Path) -> bool:
    """Whether a file is as long as was written and, where there are checksums, unchanged.

    torch stores one of each tensor and never asks for it; safetensors has none.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return True
        with ZipFile(file) as archive:
            return archive.testzip() is None
    except Exception:  # a flipped bit can make any part of the format of it
        return False


def last_written(trainer: Trainer) -> str | None:
    """The newest checkpoint that a run has written, else the one it went on from, if there is one."""
    written = [
        Path(path)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        for path in (callback.best_model_path, callback.last_model_path)
        if path and Path(path).exists()
    ]
    newest = max(written, key=lambda path: path.stat().st_mtime_ns, default=trainer.ckpt_path)
    return None if newest is None else str(newest)


def check_belongs(checkpoint: Mapping[str, Any], pattern: NMPattern, learned: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another pattern, model or choice of layers, or whose values are no numbers.

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
        raise UserError(
            f"the checkpoint holds a {mark['pattern']} run, model.pattern is {pattern}; give that run's configuration"
        )
    own = {name: tuple(value.shape) for name, value in learned.items()}
    theirs = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
    if own != theirs:
        name = min(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        raise UserError(
            f"the checkpoint is of another model or layer choice: {name!r} is {theirs.get(name)} there and "
            f"{own.get(name)} here (the checkpoint's model.lm is {mark['lm']!r}); give its run's configuration"
        )
    for name, value in checkpoint["state_dict"].items():
        if not all_finite(value):
            raise UserError(f"the checkpoint's {name!r} is not finite; go on from an earlier one")
