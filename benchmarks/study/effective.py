"""The settings that a command line of `fit` amounts to, in whatever files they stand: what a cell depends on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import yaml

from roi_lightning.cli.config_files import EXTENDS, find_config, with_extended

# Of a configuration; a name does without them.
_LEVELS: Final = ("class_path", "init_args")
_CONFIG: Final = ("--config", "-c")
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
    merged = {**dict(_options(arguments)), **dict(_flat(last))}
    return {name: _number(merged[name]) for name in sorted(merged) if name not in _NEUTRAL}


def _number(value: Any) -> Any:
    """YAML takes 5e-4 for a word; `fit` does not."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and value of every option, in the order in which they count.

    Names are those of a command line: `model.lam` for a class, `model.lam.end` for an option of it. A list is one
    value.

    Args:
        arguments: `--config FILE` and `--name value`.
    """
    for word, following in pairwise([*arguments, ""]):
        typed, equals, joined = word.partition("=")
        value = joined if equals else following
        if typed in _CONFIG:
            for file in with_extended(find_config(value)):
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
                yield from _flat({name: value for name, value in content.items() if name != EXTENDS})
        elif typed.startswith("--"):
            yield _short(typed.removeprefix("--")), yaml.safe_load(value)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Name and value of everything that a configuration gives.

    Args:
        value: The configuration, or a part of it.
        name: The part's.
    """
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(part, name if key in _LEVELS else _short(f"{name}.{key}".lstrip(".")))
    else:
        yield name, value


def _short(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _LEVELS)
