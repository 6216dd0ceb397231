"""Loggers of a configuration that name no folder write into the run's."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.loggers.logger import Logger

from roi_lightning.errors import require

_SAVE_DIR: Final = "save_dir"


def leave_folder_open(parser: ArgumentParser, theclass: Any) -> None:
    """Let a logger's own parser take it without `save_dir`, which the run's folder fills in later."""
    if isinstance(theclass, type) and issubclass(theclass, Logger):
        for action in parser._actions:
            if action.dest == _SAVE_DIR:
                action.required, action.default = False, None


def with_log_folders(logger: Any, folder: Path) -> Any:
    """What `trainer.logger` says, with a folder for every logger that has none.

    Args:
        logger: Parsed: a logger's class path and arguments, a list of such, a bool, or None.
        folder: The run's.

    Returns:
        A copy; nothing given is changed.

    Raises:
        UserError: If the package of a logger is missing.
    """
    if isinstance(logger, list):
        return [with_log_folders(each, folder) for each in logger]
    if not isinstance(logger, Namespace):
        return logger
    logger = deepcopy(logger)
    arguments = logger["init_args"]
    # Some write from a thread or process of their own, wherever this one may be by then.
    defaults = {_SAVE_DIR: str(folder.absolute())}
    if logger["class_path"].rpartition(".")[2] == "WandbLogger":
        require("wandb", "trainer.logger WandbLogger")
        defaults["name"] = folder.absolute().name
    for name, value in defaults.items():
        if name in arguments and arguments[name] is None:
            arguments[name] = value
    return logger
