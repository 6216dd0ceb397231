"""The settings that a command line of `fit` amounts to, in whatever files they stand: what a cell depends on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import yaml

from roi_lightning.cli.config_files import find_config, own_settings, with_extended

# Of a configuration; a name does without them.
_LEVELS: Final = ("class_path", "init_args")
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
    merged: dict[str, Any] = {}
    for name, value in _options(arguments):
        if name == "config":
            for file in with_extended(find_config(value)):
                merged |= dict(_flat(yaml.safe_load(own_settings(file.read_text()))))
        else:
            merged[_short(name)] = _number(yaml.safe_load(value))
    merged |= dict(_flat(last))
    return {name: merged[name] for name in sorted(merged) if name not in _NEUTRAL}


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, value in pairwise([*arguments, ""]):
        if word.startswith("--"):
            name, equals, joined = word.removeprefix("--").partition("=")
            yield name, joined if equals else value


def _short(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _LEVELS)


def _number(value: Any) -> Any:
    """YAML takes 5e-4 for a word; `fit` does not."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(part, name if key in _LEVELS else f"{name}.{key}".lstrip("."))
    else:
        yield name, _number(value)
