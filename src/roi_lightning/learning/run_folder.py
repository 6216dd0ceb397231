"""The folder of a run: everything that a run writes is in it, and no run overwrites another's results."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.export import check_destination
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import SIDECAR

RUNS: Final = Path("runs")
CHECKPOINTS: Final = "checkpoints"
CONFIG: Final = "config.yaml"
EXPORT: Final = "export"
SUMMARY: Final = "summary.json"
REPORT: Final = "report.json"
PAGE: Final = "report.html"
MASK: Final = "mask.safetensors"
BEFORE: Final = "before.safetensors"  # the mask before learning
MASKS: Final = "masks"
# What a run leaves that failed before it had a result; the next one continues or replaces it.
_TRACES: Final = (BEFORE, CONFIG, "events.out.tfevents.*")


def run_folder(trainer: Trainer) -> Path:
    """Where a run writes: its trainer's `default_root_dir`."""
    return Path(trainer.default_root_dir)


def model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks that keep checkpoints."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def keep_checkpoints_in_folder(trainer: Trainer) -> None:
    """Let every `ModelCheckpoint` that names no folder write to `checkpoints/` in the run's."""
    for callback in model_checkpoints(trainer):
        if callback.dirpath is None:
            callback.dirpath = str((run_folder(trainer) / CHECKPOINTS).absolute())


def claim_folder(trainer: Trainer, ckpt_path: str | None, overwrite: bool) -> None:
    """Refuse a folder with the results of another run, or have them replaced when training starts.

    Args:
        trainer: About to fit.
        ckpt_path: The checkpoint that this run resumes from; if it is in the folder, so are this run's own results.
        overwrite: Whether results of another run may be removed.

    Raises:
        UserError: Naming the results and the remedies, if there are any and they may not be removed, or no run made
            what is there.
    """
    folder = run_folder(trainer).absolute()
    if ckpt_path is not None and Path(ckpt_path).absolute().is_relative_to(folder):
        return
    results = list(_results(folder))
    if results and overwrite and not _made_by_a_run(folder):
        raise UserError(
            f"{str(results[0])!r} is in a folder that no run made (it has no {CONFIG} and no {MASK} of one), so "
            "--overwrite leaves it alone; name this run (--run NAME), or remove it yourself"
        )
    if results and not overwrite:
        raise UserError(
            f"{str(results[0])!r} is of an earlier run; resume that one with its own settings and --resume auto, "
            "replace it with --overwrite, or name this run (--run NAME)"
        )
    if (folder / EXPORT / SIDECAR).is_file():
        check_destination(folder / EXPORT, overwrite=overwrite)
    if overwrite:
        traces = [path for pattern in _TRACES for path in folder.glob(pattern)]
        trainer.callbacks.insert(0, RemoveAtStart([*results, *traces]))  # type: ignore[attr-defined]


def _results(folder: Path) -> Iterator[Path]:
    """What earlier runs have left in a folder of runs, apart from logs."""
    for pattern in (f"{CHECKPOINTS}/*.ckpt", MASK, f"{MASKS}/*.safetensors", SUMMARY, REPORT, PAGE):
        yield from sorted(folder.glob(pattern))
    if (folder / EXPORT / SIDECAR).is_file():
        yield folder / EXPORT


def _made_by_a_run(folder: Path) -> bool:
    """Whether a folder holds what only a run writes: its configuration, which names classes of ours, or its masks."""
    config = folder / CONFIG
    if config.is_file() and "roi_lightning." in config.read_text(encoding="utf-8", errors="replace"):
        return True
    try:
        MaskSet.load(folder / MASK)
    except UserError:
        return False
    return True


class RemoveAtStart(Callback):
    """Removes an earlier run's files once this run is certain to train.

    Args:
        paths: Files and folders.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for path in self.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        self.paths = []
