"""Histograms, pictures and hyperparameters for loggers; scalars go wherever Lightning logs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

# What TensorBoard's table of hyperparameters shows beside them: the last value of this scalar.
_RESULT: Final = "val/perplexity"


@rank_zero_only
def log_histogram(loggers: Iterable[Logger], tag: str, values: Tensor, step: int) -> None:
    """Log the distribution of a tensor's values to TensorBoard and W&B.

    Args:
        loggers: Of the trainer.
        tag: Name, with slashes between its parts.
        values: Any shape; on a CPU.
        step: Optimizer step.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(tag, values, step)
        elif isinstance(logger, WandbLogger):
            import wandb

            logger.log_metrics({tag: wandb.Histogram(values.float().numpy())}, step)


@rank_zero_only
def log_picture(loggers: Iterable[Logger], tag: str, picture: Tensor, step: int) -> None:
    """Log a picture to TensorBoard and W&B.

    Args:
        loggers: Of the trainer.
        tag: Name, with slashes between its parts.
        picture: Grey values, uint8 [1, height, width].
        step: Optimizer step.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, picture, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [picture[0].numpy()], step)


@rank_zero_only
def log_hyperparameters(loggers: Iterable[Logger], settings: Mapping[str, Any]) -> None:
    """Log the settings of a run; TensorBoard's table shows the last held-out perplexity beside them.

    Args:
        loggers: Of the trainer.
        settings: By option; plain values.
    """
    for logger in loggers:
        logger.log_hyperparams(dict(settings))
        if isinstance(logger, TensorBoardLogger):
            _fill_table(logger, settings)


def _fill_table(logger: TensorBoardLogger, settings: Mapping[str, Any]) -> None:
    from torch.utils.tensorboard.summary import hparams

    # Lightning has written this file by now, before there was anything to say.
    save_hparams_to_yaml(str(Path(logger.log_dir) / logger.NAME_HPARAMS_FILE), logger.hparams)
    shown = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in settings.items()}
    for summary in hparams(shown, {_RESULT: 0.0}):
        logger.experiment.file_writer.add_summary(summary)
