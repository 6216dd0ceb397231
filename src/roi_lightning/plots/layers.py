"""Layers chosen by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from roi_lightning.errors import UserError
from roi_lightning.masks.overlap import kind_of, place_of

MAX_LAYERS: Final = 12


def find_layers(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Pick layers by name.

    Args:
        names: Every masked tensor, in the model's order.
        patterns: Globs matched against the whole name or its end, with or without `.weight`.

    Returns:
        The matching names, in the order of the patterns, each once.

    Raises:
        UserError: If a pattern matches nothing, naming what comes near, or if they match too many to show.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            raise UserError(f"no masked layer is called {pattern!r}; {_hint(names, pattern)}")
        found |= dict.fromkeys(matching)
    if len(found) > MAX_LAYERS:
        raise UserError(
            f"--layers {' '.join(patterns)} matches {len(found)} layers and the figure shows at most "
            f"{MAX_LAYERS}; give whole names, like {next(iter(found))!r}"
        )
    return list(found)


def _matches(name: str, pattern: str) -> bool:
    return any(
        fnmatchcase(text, pattern) or fnmatchcase(text, f"*.{pattern}")
        for text in (name, name.removesuffix(".weight"))
    )


def _hint(names: Sequence[str], pattern: str) -> str:
    places = (".".join(place_of(name)[0].split(".")[-2:]) for name in names)
    known = dict.fromkeys([*map(kind_of, names), *places])
    near = get_close_matches(pattern, [*known, *names, *(name.removesuffix(".weight") for name in names)])
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"they have names like {names[0]!r}"
