"""lm-evaluation-harness without its noise."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from transformers.utils import logging as transformers_logging

from roi_lightning.data.corpora import uncounted
from roi_lightning.utils.progress import progress


@contextmanager
def silent_log() -> Iterator[None]:
    """Only errors in the harness' log."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet(description: str = "") -> Iterator[None]:
    """Without logs and bars of the harness and its libraries, counting of local files at a server, and bootstraps.

    The harness' own bars become ours.

    Args:
        description: For the progress report.
    """
    import datasets
    import lm_eval.api.metrics
    import lm_eval.api.model
    import lm_eval.api.task

    bars, verbosity = not datasets.are_progress_bars_disabled(), transformers_logging.get_verbosity()
    datasets.disable_progress_bars()
    transformers_logging.set_verbosity_error()
    api = lm_eval.api
    try:
        with (
            silent_log(),
            uncounted(),
            changed(api.task, "tqdm", _bar(f"{description}: prompts")),
            changed(api.model, "tqdm", _bar(f"{description}: tokens")),
            changed(api.metrics, "bootstrap_stderr", _no_error),
            changed(api.metrics, "math", _CAREFUL_MATH),
        ):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _bar(description: str) -> Any:
    return lambda items, **_: progress(items, description)


def _no_error(*_: Any, **__: Any) -> str:
    """As the harness spells it; a standard error without a closed form takes thousands of resamplings."""
    return "N/A"


def _exp(x: float) -> float:
    """The harness takes exp of whatever a ruined model needs per word."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


_CAREFUL_MATH: Final = SimpleNamespace(**{**vars(math), "exp": _exp})


@contextmanager
def changed(owner: Any, name: str, value: object) -> Iterator[None]:
    """Another value of an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
