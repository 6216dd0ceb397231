"""The settings that a command line of `fit` amounts to, in whatever files they stand: what a cell depends on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from roi_lightning.cli.given_options import flat_options, given_options

# They change how long it takes, and what comes out by rounding at most.
_NEUTRAL: Final = ("model.optimizer.fused",)
_EXPONENT: Final = re.compile(r"[-+]?\d+e[-+]?\d+", re.IGNORECASE)


def effective(arguments: Sequence[str], last: Mapping[str, Any]) -> dict[str, Any]:
    """All settings that count by dotted name, the later ones over the earlier ones, sorted by name.

    Names are those of a command line: `model.lam` for a class, `model.lam.end` for an option of it. A list is one
    value.

    Args:
        arguments: `--config FILE` and `--name value`, in the order in which they count.
        last: What the configuration that comes last says.
    """
    merged = {**dict(given_options(arguments, yaml.safe_load)), **dict(flat_options(last))}
    return {name: _number(merged[name]) for name in sorted(merged) if name not in _NEUTRAL}


def _number(value: Any) -> Any:
    """YAML takes 5e-4 for a word; `fit` does not."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
