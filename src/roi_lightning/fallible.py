"""Ways of doing something that not every machine can go."""

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Fallible:
    """A way that is not tried again once it has failed, because another, slower one is always there.

    Args:
        complaint: What to say the first time it fails; the reason follows in brackets.
        level: How loudly.

    Attributes:
        broken: Whether it has failed.
    """

    def __init__(self, complaint: str, level: int) -> None:
        self.complaint, self.level = complaint, level
        self.broken = False

    def try_to(self, act: Callable[[], object]) -> bool:
        """Do it, unless it has failed before; whether it was done."""
        if self.broken:
            return False
        try:
            act()
        except Exception as error:  # whatever a compiler may fail with
            self.broken = True
            _log.log(self.level, "%s (%s)", self.complaint, _reason(error))
            return False
        return True


def _reason(error: Exception) -> str:
    """The first line that says something: wrappers announce the real one with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)
