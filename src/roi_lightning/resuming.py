"""Where an interrupted run resumes: its newest whole checkpoint, and the loop's counters for this one's settings."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from roi_lightning.checkpoints import check_resumable
from roi_lightning.errors import UserError
from roi_lightning.recipe import Recipe
from roi_lightning.run_folder import CHECKPOINTS, run_folder

_SUFFIX: Final = ".ckpt"
_COUNTERS: Final = ("ready", "started", "processed", "completed")


def newest_checkpoint(folders: Sequence[Path], recipe: Recipe, max_steps: int) -> Path | None:
    """The checkpoint of a run that was written last and can be read; others are named and passed over.

    Args:
        folders: Where to look; missing ones are skipped.
        recipe: What the run learns with.
        max_steps: Its optimizer steps.

    Returns:
        Its path, or None if there is none.
    """
    for path in sorted(_checkpoints(folders), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            check_resumable(str(path), recipe, max_steps)
        except UserError as error:
            rank_zero_info(f"passed over: {error}")
            continue
        return path
    return None


def _checkpoints(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in dict.fromkeys(folder.absolute() for folder in folders):
        # Links name a file that is listed itself, and a killed run may leave them without one.
        found = (path for path in folder.glob(f"*{_SUFFIX}") if not path.is_symlink())
        yield from (path for path in found if not path.name.startswith("."))


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """The folders in which a run keeps its checkpoints."""
    callbacks = (each for each in trainer.callbacks if isinstance(each, ModelCheckpoint))  # type: ignore[attr-defined]
    return [run_folder(trainer) / CHECKPOINTS, *(Path(each.dirpath) for each in callbacks if each.dirpath)]


def align_loops(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Set a checkpoint's counters to the end of its last optimizer step.

    Lightning counts micro-batches; a checkpoint may come from another number of ranks or between two steps, and
    text and noise follow from the optimizer step alone.

    Args:
        checkpoint: As loaded; changed in place.
        accumulate: Micro-batches per optimizer step and rank of the run that goes on.
    """
    step = int(checkpoint["global_step"])
    fit = checkpoint["loops"]["fit_loop"]
    for scope in ("total", "current"):
        # As Lightning leaves them when a checkpoint is written at the end of a batch.
        _count(fit["epoch_progress"][scope], 1, 0, 0)
        _count(
            fit["epoch_loop.batch_progress"][scope],
            step * accumulate,
            step * accumulate,
            step * accumulate - 1,
        )
        _count(fit["epoch_loop.val_loop.batch_progress"][scope], 0, 0, 0)
    fit["epoch_loop.batch_progress"]["is_last_batch"] = False
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1


def _count(counters: dict[str, int], begun: int, processed: int, completed: int) -> None:
    counters.update(zip(_COUNTERS, (begun, begun, processed, completed), strict=True))
