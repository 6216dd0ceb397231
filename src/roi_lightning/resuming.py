"""Where an interrupted run goes on: its newest whole checkpoint, and the loop's counters for this one's settings."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from roi_lightning.checkpoints import check_checkpoint
from roi_lightning.errors import UserError

_SUFFIX: Final = ".ckpt"
_COUNTERS: Final = ("ready", "started", "processed", "completed")


def newest_checkpoint(folders: Sequence[Path]) -> Path | None:
    """The checkpoint written last that can be read; those that can't are named and passed over.

    Args:
        folders: Where to look; missing ones are skipped.

    Returns:
        Its path, or None if there is none.
    """
    for path in sorted(_checkpoints(folders), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            check_checkpoint(str(path))
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
    """The folders in which this configuration's runs keep their checkpoints, one for each version of a logger."""
    given = [callback.dirpath for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]  # type: ignore[attr-defined]
    folders = [Path(folder) for folder in given if folder]
    for root in _roots(trainer):
        folders += [root / "checkpoints", *sorted(root.glob("*/checkpoints"))]
    return folders


def _roots(trainer: Trainer) -> list[Path]:
    if not trainer.loggers:
        return [Path(trainer.default_root_dir)]
    logger = trainer.loggers[0]
    # As ModelCheckpoint: save_dir / name / version, of which loggers on files make root_dir.
    root = getattr(logger, "root_dir", None) or Path(logger.save_dir or ".") / str(logger.name or "")
    return [Path(root)]


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
