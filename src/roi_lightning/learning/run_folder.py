"""The folder of a run: everything that a run writes is in it, and no run overwrites another's results."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.export import check_destination
from roi_lightning.masks.mask_set import EXPORT
from roi_lightning.models.source import SIDECAR

RUNS: Final = Path("runs")
CHECKPOINTS: Final = "checkpoints"
CONFIG: Final = "config.yaml"
SUMMARY: Final = "summary.json"
MASK: Final = "mask.safetensors"
REPORT: Final = "report.json"
PAGE: Final = "report.html"
BEFORE: Final = "before.safetensors"  # the mask before learning
MASKS: Final = "masks"
RUN: Final = ".run"  # says that a run made the folder, and is locked while one goes on
LOGS: Final = "events.out.tfevents.*"


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


def lock_folder(trainer: Trainer) -> TextIO:
    """Keep other runs out of a run's folder until the file that is returned is closed, if only by a kill.

    Where files can't be locked it warns, and keeps none out.

    Raises:
        UserError: If another run is going on there.
    """
    folder = run_folder(trainer)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / RUN).open("a")
    try:
        if trainer.is_global_zero:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"a run is going on in {str(folder)!r}; wait, or name this one (--run)") from None
    except OSError:
        rank_zero_warn(f"{folder} is where files can't be locked: other runs are not kept out of it")
    return file


def claim_folder(trainer: Trainer, ckpt_path: str | None, overwrite: bool) -> None:
    """Refuse a folder with the results of another run; have what one left replaced when training starts at step 0.

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
    if results and not overwrite:
        raise UserError(
            f"{str(results[0])!r} is of an earlier run; resume that one with its own settings and --resume auto, "
            "replace it with --overwrite, or name this run (--run NAME)"
        )
    # What a run leaves that ended before it had a result is replaced in any case.
    replaced = [*results, *(path for path in (folder / BEFORE, folder / CONFIG) if path.exists())]
    is_own = (folder / RUN).exists()
    if replaced and not is_own:
        raise UserError(
            f"{str(replaced[0])!r} is in a folder that no run made (it has no {RUN}), so it is left alone; name this "
            "run (--run NAME), or remove it yourself"
        )
    if (folder / EXPORT / SIDECAR).is_file():
        check_destination(folder / EXPORT, overwrite=overwrite)
    if is_own:
        logs = list(folder.glob(LOGS))
        if logs:
            rank_zero_info(f"{folder} has the log of an earlier run, which this one replaces")
        trainer.callbacks.insert(0, RemoveAtStart([*replaced, *logs]))  # type: ignore[attr-defined]


def _results(folder: Path) -> Iterator[Path]:
    """What earlier runs have left in a folder of runs, apart from logs."""
    for pattern in (f"{CHECKPOINTS}/*.ckpt", MASK, f"{MASKS}/step-*.safetensors", SUMMARY, REPORT, PAGE):
        yield from sorted(folder.glob(pattern))
    if (folder / EXPORT / SIDECAR).is_file():
        yield folder / EXPORT


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
