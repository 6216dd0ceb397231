"""Where a run writes what is not a log."""

from pathlib import Path

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path:
    """The logger's folder of this run, or `default_root_dir` without a logger.

    The first rank decides: every rank has to ask.
    """
    return Path(trainer.log_dir or trainer.default_root_dir)
