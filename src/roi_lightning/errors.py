"""Errors that a user can fix, which commands print without a traceback, and the parts of their messages."""

import importlib.util
import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal

_MOST: Final = 600
_LONGEST_REASON: Final = 200


class UserError(ValueError):
    """Bad input. The message names the offending value and the remedy."""


def check_at_least(options: object, prefix: str = "--", **lowest: float) -> None:
    """Refuse numbers that are too small.

    Args:
        options: An object with the numbers as attributes; one that it lacks, or that is None, is none.
        prefix: What to write before a name.
        **lowest: The least allowed by name.

    Raises:
        UserError: For the first that is less, or not a number.
    """
    for name, minimum in lowest.items():
        value = getattr(options, name, None)
        if value is not None and not value >= minimum:
            raise UserError(f"{prefix}{name} is {value}; give at least {minimum}")


def user_path(text: str, what: str = "a path") -> Path:
    """The path that a user means: as it stands if it is there, else with `~` and `~name` for home folders.

    Raises:
        UserError: If it is empty, naming `what` is.
    """
    if not text.strip():
        raise UserError(f"{what} is empty; give one")
    return Path(text if os.path.lexists(text) else os.path.expanduser(text))  # noqa: PTH111


def reason(error: BaseException) -> str:
    """The first line that says something of an error's text, cut to 200 characters; its type where it has none."""
    stripped = (line.strip() for line in str(error).splitlines())
    # "401 Client Error." and the like say less than the line after them.
    lines = [line for line in stripped if line and "Client Error" not in line] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said.rstrip(".") if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]} …"


def brief(text: str) -> str:
    """A message in one line. Too long a one loses its middle: names stand first and remedies last."""
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip()).replace(":;", ":")
    return line if len(line) <= _MOST else f"{line[: _MOST // 2]} … {line[-_MOST // 2 :]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question to end an error about an unknown name with; empty if nothing known is near."""
    near = get_close_matches(word, list(known), cutoff=0.65)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def near_folder(path: str | Path) -> str:
    """The same question about a folder that is not there."""
    return did_you_mean(str(path), map(str, Path(path).parent.glob("*/")))


Extra = Literal["8bit", "eval", "gguf", "wandb"]
_PACKAGES: Final[dict[Extra, tuple[str, ...]]] = {
    "8bit": ("torchao",),
    "eval": ("lm_eval",),
    "gguf": ("accelerate", "gguf"),
    "wandb": ("wandb",),
}


def install(extra: Extra) -> str:
    """The command that installs an extra."""
    return f"pip install 'roi-lightning[{extra}]'"


def require(extra: Extra, what: str) -> None:
    """Refuse what an optional dependency is missing for; nothing is imported.

    Args:
        extra: Of pyproject.toml, which brings the packages.
        what: Begins the message; the value that was asked for.

    Raises:
        UserError: Naming the packages and the command that installs them.
    """
    missing = [name for name in _PACKAGES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {' and '.join(missing)}; run `{install(extra)}`")
