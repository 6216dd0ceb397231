"""Which layers to show: where each stands in the model, a default choice, a choice by name."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from roi_lightning.errors import UserError
from roi_lightning.overlap import kind_of

MOST_LAYERS: Final = 12
_KINDS: Final = ("q_proj", "k_proj", "up_proj")


def place_of(name: str) -> tuple[str, int]:
    """Where a layer stands: `model.layers.3.mlp.up_proj.weight` is `model.layers.mlp.up_proj` of block 3."""
    parts = name.removesuffix(".weight").split(".")
    numbers = [int(part) for part in parts if part.isdecimal()]
    return ".".join(part for part in parts if not part.isdecimal()), numbers[0] if numbers else 0


def shown_layers(names: Sequence[str]) -> list[str]:
    """The layers that the figure shows unasked: the query, key and up projections of the middle block.

    Args:
        names: Every masked tensor, in the model's order.

    Returns:
        At most three names of one block; other kinds where a model has none of these.
    """
    blocks: dict[int, dict[str, str]] = {}
    for name in names:
        blocks.setdefault(place_of(name)[1], {}).setdefault(_last_two(name), name)
    choices = [_preferred(layers) for _, layers in sorted(blocks.items())]
    wanted = [sum(kind_of(name) in _KINDS for name in choice) for choice in choices]
    best = [choice for choice, count in zip(choices, wanted, strict=True) if count == max(wanted)]
    return best[len(best) // 2]


def _last_two(name: str) -> str:
    return ".".join(place_of(name)[0].split(".")[-2:])


def _preferred(layers: Mapping[str, str]) -> list[str]:
    first: dict[str, str] = {}
    for name in layers.values():
        first.setdefault(kind_of(name), name)
    chosen = [first[kind] for kind in _KINDS if kind in first]
    return [*chosen, *(name for name in layers.values() if name not in chosen)][:3]


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
    if len(found) > MOST_LAYERS:
        raise UserError(
            f"--layers {' '.join(patterns)} matches {len(found)} layers and the figure has room for "
            f"{MOST_LAYERS}; give whole names, like {next(iter(found))!r}"
        )
    return list(found)


def _matches(name: str, pattern: str) -> bool:
    return any(
        fnmatchcase(text, pattern) or fnmatchcase(text, f"*.{pattern}")
        for text in (name, name.removesuffix(".weight"))
    )


def _hint(names: Sequence[str], pattern: str) -> str:
    known = dict.fromkeys([*map(kind_of, names), *map(_last_two, names)])
    near = get_close_matches(pattern, [*known, *names, *(name.removesuffix(".weight") for name in names)])
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"they have names like {names[0]!r}"
