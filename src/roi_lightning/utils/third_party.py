"""Raise other libraries' errors about a configuration as the user's; silence their warnings."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException

from roi_lightning.errors import UserError, brief

_MISTAKES = MisconfigurationException, ValueError, TypeError, OverflowError, ImportError, RuntimeError


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise a mistake in the configuration as the UserError behind the parser's exceptions.

    Raises:
        UserError: What jsonargparse has wrapped, or made of what Lightning or a class raises for values that it
            can't take.
    """
    try:
        yield
    except _MISTAKES as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        said = brief(str(error)) or type(error).__name__
        raise UserError(f"the configuration can't be used: {said}; give another value") from error


def silence_warnings() -> None:
    """Silence what other libraries warn of on every run and no user could act on."""
    # Lightning 2.6 asks torch 2.13 about tree leaves the old way.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    # The order of the text is a function of seed and step; loading it takes no time beside a step.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # A Mac's, on which no mask can be learned, or the configuration says so.
    warnings.filterwarnings("ignore", message="GPU available but not used")
    # A run has one epoch, so workers are started once.
    warnings.filterwarnings("ignore", message="Consider setting `persistent_workers=True`")
    # A run that resumes in its own folder is intended.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    # A checkpoint of another folder may be named: only its list of checkpoints stays behind.
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advice)
    # The configuration says so.
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("💡", "\nDetected KeyboardInterrupt"))
