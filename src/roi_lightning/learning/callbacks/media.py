"""Histograms, pictures, texts and hyperparameters, to each kind of logger as it takes them.

Only the package of a logger in use is imported. Loggers of other kinds get scalars and hyperparameters alone.
"""

import csv
from collections.abc import Iterable, Mapping
from functools import singledispatch
from pathlib import Path
from typing import Any, Final

import numpy as np
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

_BINS: Final = 64
# What TensorBoard's table of hyperparameters shows beside them: the last value of this scalar.
_RESULT: Final = "val/perplexity"


@rank_zero_only
def log_histogram(loggers: Iterable[Logger], tag: str, values: Tensor, step: int) -> None:
    """Log the distribution of a tensor's values.

    CSVLogger and MLFlowLogger, which have no histograms, get a file of the edges and counts of 64 bins.

    Args:
        loggers: Of the trainer.
        tag: Name, with slashes between its parts.
        values: Any shape; on a CPU.
        step: Optimizer step.
    """
    for logger in loggers:
        _histogram(logger, tag, values, step)


@rank_zero_only
def log_picture(loggers: Iterable[Logger], tag: str, picture: Tensor, step: int) -> None:
    """Log a picture; CSVLogger gets a PNG file.

    Args:
        loggers: Of the trainer.
        tag: Name, with slashes between its parts.
        picture: Grey values, uint8 [1, height, width].
        step: Optimizer step.
    """
    for logger in loggers:
        _picture(logger, tag, picture, step)


@rank_zero_only
def log_texts(loggers: Iterable[Logger], tag: str, markdown: str, step: int) -> None:
    """Log a text; CSVLogger and MLFlowLogger get a Markdown file.

    Args:
        loggers: Of the trainer.
        tag: Name, with slashes between its parts.
        markdown: The text.
        step: Optimizer step.
    """
    for logger in loggers:
        log_text(logger, tag, markdown, step)


@singledispatch
def log_text(logger: Logger, tag: str, text: str, step: int) -> None:
    """Log a text to one logger; see `log_texts`."""


@singledispatch
def log_hyperparameters(logger: Logger, settings: Mapping[str, Any]) -> None:
    """Log the settings of a run to one logger.

    Args:
        logger: Of the trainer.
        settings: By option; plain values.
    """
    logger.log_hyperparams(dict(settings))


@singledispatch
def _histogram(logger: Logger, tag: str, values: Tensor, step: int) -> None: ...


@singledispatch
def _picture(logger: Logger, tag: str, picture: Tensor, step: int) -> None: ...


# TensorBoard.


@_histogram.register
def _(logger: TensorBoardLogger, tag: str, values: Tensor, step: int) -> None:
    logger.experiment.add_histogram(tag, values, step)


@_picture.register
def _(logger: TensorBoardLogger, tag: str, picture: Tensor, step: int) -> None:
    logger.experiment.add_image(tag, picture, step)


@log_text.register
def _(logger: TensorBoardLogger, tag: str, text: str, step: int) -> None:
    logger.experiment.add_text(tag, text, step)


@log_hyperparameters.register
def _(logger: TensorBoardLogger, settings: Mapping[str, Any]) -> None:
    from torch.utils.tensorboard.summary import hparams

    logger.log_hyperparams(dict(settings))
    # Lightning has written this file by now, before there was anything to say.
    save_hparams_to_yaml(str(Path(logger.log_dir) / logger.NAME_HPARAMS_FILE), logger.hparams)
    shown = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in settings.items()}
    for summary in hparams(shown, {_RESULT: 0.0}):
        logger.experiment.file_writer.add_summary(summary)


# Weights & Biases.


@_histogram.register
def _(logger: WandbLogger, tag: str, values: Tensor, step: int) -> None:
    import wandb

    logger.log_metrics({tag: wandb.Histogram(np_histogram=_binned(values))}, step)


@_picture.register
def _(logger: WandbLogger, tag: str, picture: Tensor, step: int) -> None:
    logger.log_image(tag, [picture[0].numpy()], step)


@log_text.register
def _(logger: WandbLogger, tag: str, text: str, step: int) -> None:
    logger.log_text(tag, ["step", "text"], [[str(step), text]], step=step)


# MLflow.


@_histogram.register
def _(logger: MLFlowLogger, tag: str, values: Tensor, step: int) -> None:
    counts, edges = _binned(values)
    binned = {"edges": edges.tolist(), "counts": counts.tolist()}
    logger.experiment.log_dict(logger.run_id, binned, f"{_file(tag, step)}.json")


@_picture.register
def _(logger: MLFlowLogger, tag: str, picture: Tensor, step: int) -> None:
    logger.experiment.log_image(logger.run_id, picture[0].numpy(), key=tag, step=step, synchronous=True)


@log_text.register
def _(logger: MLFlowLogger, tag: str, text: str, step: int) -> None:
    logger.experiment.log_text(logger.run_id, text, f"{_file(tag, step)}.md")


# Files beside CSVLogger's metrics.csv.


@_histogram.register
def _(logger: CSVLogger, tag: str, values: Tensor, step: int) -> None:
    counts, edges = _binned(values)
    with _beside(logger, f"{_file(tag, step)}.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["from", "to", "count"])
        rows.writerows(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))


@_picture.register
def _(logger: CSVLogger, tag: str, picture: Tensor, step: int) -> None:
    from PIL import Image

    Image.fromarray(picture[0].numpy()).save(_beside(logger, f"{_file(tag, step)}.png"))


@log_text.register
def _(logger: CSVLogger, tag: str, text: str, step: int) -> None:
    _beside(logger, f"{_file(tag, step)}.md").write_text(text, encoding="utf-8")


def _binned(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return np.histogram(values.float().numpy(), _BINS)


def _file(tag: str, step: int) -> str:
    return f"{tag}/step-{step:06d}"


def _beside(logger: CSVLogger, name: str) -> Path:
    path = Path(logger.log_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
