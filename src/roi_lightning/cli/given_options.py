"""The options that a command line gives, in whatever files they stand, and which of them a change of class drops."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import yaml

from roi_lightning.cli.config_files import find_config, own_settings, with_extended

# Of a configuration; a name does without them.
_LEVELS: Final = ("class_path", "init_args")
_CONFIG: Final = ("--config", "-c")


def given_options(arguments: Sequence[str], read: Callable[[str], Any] = str) -> Iterator[tuple[str, Any]]:
    """Name and value of every option, in the order in which they count.

    Names are those of a command line: `model.lam` for a class, `model.lam.end` for an option of it. A list is one
    value.

    Args:
        arguments: `--config FILE` and `--name value`.
        read: What makes a value of the text on the command line.
    """
    for word, following in pairwise([*arguments, ""]):
        typed, equals, joined = word.partition("=")
        value = joined if equals else following
        if typed in _CONFIG:
            for file in with_extended(find_config(value)):
                yield from flat_options(yaml.safe_load(own_settings(file.read_text(encoding="utf-8"))))
        elif typed.startswith("--"):
            yield _short(typed.removeprefix("--")), read(value)


def flat_options(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Name and value of everything that a configuration gives.

    Args:
        value: The configuration, or a part of it.
        name: The part's.
    """
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from flat_options(part, name if key in _LEVELS else _short(f"{name}.{key}".lstrip(".")))
    else:
        yield name, value


def dropped_options(arguments: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """What was given and does not count, because another class has taken the place of the one it was meant for.

    Args:
        arguments: As given; all of it was accepted.
        config: What became of it, classes as `class_path` and `init_args`.

    Returns:
        A line for every class that lacks some of the options given for another one.
    """
    dropped: dict[tuple[str, str], dict[str, None]] = {}
    for name, _ in given_options(arguments):
        if (lost := _lost(name.replace("-", "_").split("."), config)) is not None:
            dropped.setdefault(lost[:2], {})[lost[2]] = None
    return [
        f"{where} is {kind} now; dropped options: {', '.join(options)}"
        for (where, kind), options in dropped.items()
    ]


def _lost(parts: Sequence[str], config: Any) -> tuple[str, str, str] | None:
    """Where a class lacks an option of this name, which class, and the option; None if none does."""
    for depth, part in enumerate(parts):
        if not isinstance(config, Mapping):
            return None
        kind: str | None = config.get("class_path")
        options = config if kind is None else {**config.get("init_args", {}), **config.get("dict_kwargs", {})}
        if part not in options:
            return None if kind is None else (".".join(parts[:depth]), kind.rpartition(".")[2], part)
        config = options[part]
    return None


def _short(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _LEVELS)
