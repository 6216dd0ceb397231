"""What other libraries say: about a configuration, as errors of this project; on every run, not at all."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lightning.fabric.utilities.exceptions import MisconfigurationException

from roi_lightning.errors import UserError

_ERROR_LINES: Final = 3
_NOTHING: Final = "Expected a <class 'NoneType'>"


def parser_complaint(message: str) -> str:
    """What jsonargparse says, in a line.

    Where a value may be of several kinds it lists all of them first; the reasons and the value come later.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip()]
    if "Errors:" not in lines:
        return "; ".join(lines[:_ERROR_LINES]).replace(":;", ":")
    after = lines[lines.index("Errors:") + 1 :]
    reasons = [line for line in after if not line.startswith(("Given value", _NOTHING))]
    value = next((line for line in after if line.startswith("Given value:")), "")
    return "; ".join(filter(None, [f"{lines[0]} {reasons[0]}", *reasons[1:_ERROR_LINES], value])).replace(
        ":;", ":"
    )


@contextmanager
def plain_errors() -> Iterator[None]:
    """Let a mistake in the configuration come out as it was said, without the parser's account of it.

    Raises:
        UserError: Found behind whatever jsonargparse wrapped it in, or made of what Lightning or a class says
            of values that it can't take.
    """
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, OverflowError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        raise UserError(f"the configuration can't be used: {_first(error)}; give another value") from error


def _first(error: Exception) -> str:
    lines = parser_complaint(str(error)).splitlines()
    return lines[0] if lines else type(error).__name__


def silence_remarks() -> None:
    """Leave out what other libraries say on every run and no user could act on."""
    # Lightning 2.6 asks torch 2.13 about tree leaves the old way.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    # The order of the text is a function of seed and step; loading it takes no time beside a step.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # A run has one epoch, so workers are started once.
    warnings.filterwarnings("ignore", message="Consider setting `persistent_workers=True`")
    # A run that resumes in its own folder is meant.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    # A checkpoint of another folder may be named: only its list of checkpoints stays behind.
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("💡")
