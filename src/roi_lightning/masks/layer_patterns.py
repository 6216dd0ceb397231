"""Mixed patterns: an N:M of its own for each layer, or none where a layer stays dense."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern

DENSE: Final = "dense"
_ALL: Final = "*"


@dataclass(frozen=True)
class LayerPatterns:
    """The patterns of layers that do not all have the same one.

    Attributes:
        by_glob: Pattern, None for dense, by a layer's full name or a glob as in `matches`. A full name wins over
            globs; of several globs that match, the last.
    """

    by_glob: dict[str, NMPattern | None]

    def __str__(self) -> str:
        """Every pattern once, the sparsest first: `2:4 + 4:8 + dense`."""
        return " + ".join([*map(str, self.distinct), *([DENSE] if None in self.by_glob.values() else [])])

    @property
    def distinct(self) -> tuple[NMPattern, ...]:
        """Every N:M once, the sparsest first."""
        found = {pattern for pattern in self.by_glob.values() if pattern is not None}
        return tuple(sorted(found, key=lambda pattern: (pattern.n / pattern.m, pattern.m)))

    def find(self, name: str) -> NMPattern | None:
        """The pattern of a layer, None if it stays dense."""
        if name in self.by_glob:
            return self.by_glob[name]
        return next(pattern for glob, pattern in reversed(self.by_glob.items()) if matches(name, glob))

    def of(self, name: str) -> NMPattern:
        """The pattern of a layer that has one."""
        pattern = self.find(name)
        assert pattern is not None, f"{name} stays dense"
        return pattern

    def renamed(self, names: Mapping[str, str]) -> "LayerPatterns":
        """The patterns of the layers in `names`, each under its new name."""
        return LayerPatterns({new: self.find(name) for name, new in names.items()})

    def spelled(self) -> dict[str, str]:
        """`by_glob` as one writes it."""
        return {glob: DENSE if pattern is None else str(pattern) for glob, pattern in self.by_glob.items()}


Pattern = NMPattern | LayerPatterns


def mixed_pattern(default: NMPattern, patterns: Mapping[str, NMPattern | str | int]) -> Pattern:
    """The patterns of a model's layers.

    Args:
        default: Of layers that nothing else is said of.
        patterns: `N:M` or `dense` by a layer's name or a glob.

    Returns:
        `default` itself if there is nothing else.

    Raises:
        UserError: Naming the glob whose pattern can't be read.
    """
    if not patterns:
        return default
    read = {str(glob): _read(glob, value) for glob, value in patterns.items()}
    return LayerPatterns(read if _ALL in read else {_ALL: default, **read})


def _read(glob: str, value: object) -> NMPattern | None:
    if value == DENSE:
        return None
    try:
        return NMPattern(value)  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"patterns, {glob!r}: {error}, or {DENSE}") from error


def layer_patterns(by_name: Mapping[str, NMPattern | None]) -> Pattern:
    """The patterns of layers by their full names; one `NMPattern` if they are all the same and none is dense."""
    first, *others = set(by_name.values())
    return LayerPatterns(dict(by_name)) if first is None or others else first


def matches(name: str, glob: str) -> bool:
    """Whether a glob matches a layer's whole dotted name or its end."""
    return name == glob or fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def is_mixed(label: str) -> bool:
    """Whether a pattern as it is written, `2:4` or `2:4 + dense`, is a mixed one."""
    return " + " in label
