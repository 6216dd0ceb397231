"""Optional dependencies: what is missing, and the extra that brings it."""

import importlib.util
from typing import Final, Literal

from roi_lightning.errors import UserError

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
