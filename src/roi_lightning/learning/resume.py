"""Check that a training checkpoint is intact and of this run, and find the one an interrupted run resumes from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from safetensors import safe_open
from torch import Tensor

from roi_lightning.errors import UserError
from roi_lightning.learning.checkpoint_io import read_rest, stored_files
from roi_lightning.learning.recipe import Recipe, check_same_run
from roi_lightning.learning.run_folder import CHECKPOINTS, model_checkpoints, run_folder
from roi_lightning.masks.layer_patterns import LayerPatterns, Pattern
from roi_lightning.utils.dtensor import all_finite

_KEY: Final = "roi_lightning"
_MARKS: Final = frozenset(("pattern", "lm", "recipe", "max_steps", "validated"))
_COUNTERS: Final = ("ready", "started", "processed", "completed")


def mark_checkpoint(checkpoint: dict[str, Any], pattern: Pattern, **facts: Any) -> None:
    """Note in a checkpoint which run it is of.

    Args:
        checkpoint: About to be written.
        pattern: Of the run's layers.
        facts: `lm`, `recipe`, `max_steps`, and `validated`: the optimizer step after which it last validated, if any.
    """
    checkpoint[_KEY] = {"pattern": str(pattern), **facts} | by_layer(pattern)


def by_layer(pattern: Pattern) -> dict[str, dict[str, str]]:
    """The option `patterns` with which layers have the patterns that they have; nothing if they all have one."""
    return {"patterns": pattern.spelled()} if isinstance(pattern, LayerPatterns) else {}


def check_checkpoint(path: str) -> None:
    """Refuse a checkpoint that is missing, damaged, not plain tensors, or of another program.

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
    check_same_run(recipe, mark["recipe"], path)
    if max_steps < mark["max_steps"]:
        raise UserError(
            f"checkpoint {path!r} is of a run of {mark['max_steps']} optimizer steps, and trainer.max_steps is "
            f"{max_steps}; it may grow, or pass --allow_changed_settings if the change is meant"
        )
    check_checkpoint(path)


def check_belongs(checkpoint: Mapping[str, Any], pattern: Pattern, learned: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another pattern, model or choice of layers, or with non-finite values.

    Args:
        checkpoint: As loaded.
        pattern: Of this run's layers.
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
    if mark.get("patterns") != by_layer(pattern).get("patterns"):
        raise UserError(
            f"the checkpoint's layers have other patterns than model.patterns gives them, though both are {pattern}; "
            "give that run's configuration"
        )
    here = {name: tuple(value.shape) for name, value in learned.items()}
    there = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
    if here != there:
        name = min(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        raise UserError(
            f"the checkpoint is of another model or layer choice: {name!r} is {there.get(name)} there and "
            f"{here.get(name)} here (the checkpoint's model.lm is {mark['lm']!r}); give its run's configuration"
        )
    for name, value in checkpoint["state_dict"].items():
        if not all_finite(value):
            raise UserError(f"the checkpoint's {name!r} is not finite; resume from an earlier one")


def stored_recipe(path: str) -> Recipe:
    """The recipe that a checkpoint was learned with."""
    recipe: Recipe = _read_mark(path)["recipe"]
    return recipe


def _read_mark(path: str) -> dict[str, Any]:
    if not Path(path).exists():
        raise UserError(f"no checkpoint at {path!r}; give one from <run folder>/checkpoints/")
    try:
        loaded = read_rest(Path(path))
    except Exception as error:
        raise UserError(
            f"checkpoint {path!r} can't be read: it is damaged or of another program; give another from its folder"
        ) from error
    if not isinstance(loaded, dict) or not _is_ours(loaded):
        raise UserError(
            f"checkpoint {path!r} was not written by roi_lightning; give one from a run's checkpoints/"
        )
    mark: dict[str, Any] = loaded[_KEY]
    return mark


def _is_ours(loaded: dict[str, Any]) -> bool:
    mark, state = loaded.get(_KEY), loaded.get("state_dict")
    marked = isinstance(mark, dict) and mark.keys() >= _MARKS and "global_step" in loaded
    return marked and isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())


def _intact(file: Path) -> bool:
    """Whether a file has the length it was written with and, where there are checksums, the same bytes.

    torch stores a checksum of each tensor and never compares it; safetensors stores none.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return True
        with ZipFile(file) as archive:
            return archive.testzip() is None
    except Exception:  # a flipped bit can break any part of the format
        return False


def last_written(trainer: Trainer) -> str | None:
    """The newest checkpoint that a run has written, else the one it resumed from, if there is one."""
    paths = (
        path for each in model_checkpoints(trainer) for path in (each.best_model_path, each.last_model_path)
    )
    written = [Path(path) for path in paths if path and Path(path).exists()]
    newest = max(written, key=modified, default=trainer.ckpt_path)
    return None if newest is None else str(newest)


def newest_checkpoint(trainer: Trainer, recipe: Recipe) -> Path | None:
    """Find the checkpoint of `--resume auto`: the last written that can be read; others are named and passed over.

    Args:
        trainer: Its folder and the folders of its callbacks are searched.
        recipe: What the run learns with.

    Returns:
        Its path, or None if there is none.
    """
    own, callbacks = run_folder(trainer) / CHECKPOINTS, model_checkpoints(trainer)
    folders = [own, *(Path(each.dirpath) for each in callbacks if each.dirpath)]
    paths = {path for folder in folders for path in folder.absolute().glob("[!.]*.ckpt")}
    # Links name a file that is listed itself, and a killed run may leave them without one.
    for path in sorted((path for path in paths if not path.is_symlink()), key=modified, reverse=True):
        try:
            check_resumable(str(path), recipe, trainer.max_steps)
        except UserError as error:
            rank_zero_info(f"passed over: {error}")
            continue
        return path
    return None


def modified(path: str | Path) -> int:
    """When a file was written, in nanoseconds; 0 if there is none."""
    return Path(path).stat().st_mtime_ns if path and Path(path).exists() else 0


def align_loops(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Set a checkpoint's counters to the end of its last optimizer step.

    Lightning counts micro-batches; a checkpoint may come from another number of ranks or between two steps, and
    text and noise follow from the optimizer step alone. It would also take a checkpoint of a step at which
    validation is due for one that was written after it: one that was not counts as in the middle of it.

    Args:
        checkpoint: As loaded; changed in place.
        accumulate: Micro-batches per optimizer step and rank of the resumed run.
    """
    step = int(checkpoint["global_step"])
    fit, batches = checkpoint["loops"]["fit_loop"], step * accumulate
    for scope in ("total", "current"):
        # As Lightning leaves them when a checkpoint is written at the end of a batch.
        _count(fit["epoch_progress"][scope], 1, 0, 0)
        _count(fit["epoch_loop.batch_progress"][scope], batches, batches, batches - 1)
        _count(fit["epoch_loop.val_loop.batch_progress"][scope], 0, 0, 0)
    if checkpoint[_KEY]["validated"] != step:
        _count(fit["epoch_loop.val_loop.batch_progress"]["total"], 1, 0, 0)
    fit["epoch_loop.batch_progress"]["is_last_batch"] = False
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1


def _count(counters: dict[str, int], begun: int, processed: int, completed: int) -> None:
    counters.update(zip(_COUNTERS, (begun, begun, processed, completed), strict=True))
