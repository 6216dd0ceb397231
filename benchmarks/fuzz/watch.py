"""One fuzzed case under watch: what became of it, and whether that is a finding."""

import contextlib
import io
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from roi_lightning.__main__ import OF_THE_SYSTEM
from roi_lightning.errors import UserError

SECONDS = 30
GIGABYTES = 4


class WrongError(AssertionError):
    """Something was accepted that had to be refused."""


class HangError(BaseException):
    """A case took too long; no handler of ordinary errors may swallow it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: What was done to the good input.
        result: `accepted`, `refused`, or the name of what it raised.
        finding: What is wrong; None if nothing is.
    """

    kind: str
    result: str
    finding: str | None = None


Case = Callable[[random.Random], tuple[str, Callable[[], None]]]


def watch(case: Case, seed: int) -> Outcome:
    """Make a case of a seed and run it.

    Args:
        case: Draws what to try: its kind, and a function that tries it. That one returns if the input was
            accepted rightly and raises UserError, or ends as a command line's parser does, if it was refused.
        seed: Of the case alone.
    """
    kind, attempt = case(random.Random(seed))
    said = io.StringIO()
    try:
        with _limited(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            attempt()
    except UserError as error:
        return Outcome(kind, "refused", None if str(error).strip() else "an error without words")
    except OF_THE_SYSTEM:  # of which the program makes a line
        return Outcome(kind, "refused")
    except SystemExit as stop:
        printed = said.getvalue()
        clean = stop.code in (1, 2) and printed.count("error: ") >= 1 and "Traceback" not in printed
        return Outcome(kind, "refused", None if clean else f"ended with {stop.code}: {printed[-300:]}")
    except (Exception, HangError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} at {where.name}:{where.lineno}: {str(error)[:200]}"
        return Outcome(kind, type(error).__name__, text)
    return Outcome(kind, "accepted")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory() -> None:
    """Let this process grow by a few gigabytes and no more, so that an explosion is a MemoryError."""
    with open("/proc/self/statm") as file:  # noqa: PTH123 - no file, a window into the kernel
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + GIGABYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
