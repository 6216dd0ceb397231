"""What a command line of `fit` comes to, whatever configurations said it: that is what a cell depends on."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from roi_lightning.config_files import find_config


def effective(arguments: Sequence[str], last: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by dotted name, the later ones over the earlier ones, sorted by name.

    Names are those of a command line: `model.lam` for a class, `model.lam.end` for an option of it. A list is one
    value.

    Args:
        arguments: `--config FILE` and `--name value`, in the order in which they count.
        last: What the configuration that comes last says.
    """
    merged: dict[str, Any] = {}
    for name, value in _options(arguments):
        if name == "config":
            merged |= dict(_flat(yaml.safe_load(find_config(value).read_text())))
        else:
            merged[name] = yaml.safe_load(value)
    return dict(sorted((merged | dict(_flat(last))).items()))


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, value in pairwise([*arguments, ""]):
        if word.startswith("--"):
            name, equals, joined = word.removeprefix("--").partition("=")
            yield name, joined if equals else value


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(
                part, name if key in ("class_path", "init_args") else f"{name}.{key}".lstrip(".")
            )
    else:
        yield name, value
