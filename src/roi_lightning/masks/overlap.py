"""How much of what one mask keeps another keeps too: overall, by kind of layer, by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_SHOWN_KINDS: Final = ("q_proj", "k_proj", "up_proj")
# Of the blocks whose masks a run pictures: the first, the middle and the last.
RUN_DEPTHS: Final = (0, 0.5, 1)


@dataclass(frozen=True)
class Overlap:
    """What two masks keep in common.

    Attributes:
        both: Weights kept by both masks, per layer.
        kept: Weights kept by either one of them, per layer (the pattern makes the two equal).
    """

    both: dict[str, int]
    kept: dict[str, int]

    @property
    def all(self) -> float:
        """Kept by both ÷ kept, over all layers."""
        return sum(self.both.values()) / sum(self.kept.values())

    @property
    def layers(self) -> dict[str, float]:
        """The same by layer."""
        return {name: both / self.kept[name] for name, both in self.both.items()}

    @property
    def kinds(self) -> dict[str, float]:
        """The same by kind of layer."""
        both, kept = by_kind(self.both), by_kind(self.kept)
        return {kind: both[kind] / kept[kind] for kind in both}


def kind_of(name: str) -> str:
    """The kind of layer that a tensor belongs to: `model.layers.0.mlp.up_proj.weight` is an `up_proj`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def by_kind(counts: Mapping[str, int]) -> dict[str, int]:
    """Sum counts per tensor into counts per kind, in order of first appearance."""
    sums: dict[str, int] = {}
    for name, count in counts.items():
        sums[kind_of(name)] = sums.get(kind_of(name), 0) + count
    return sums


def place_of(name: str) -> tuple[str, int]:
    """Where a layer is: `model.layers.3.mlp.up_proj.weight` is `model.layers.mlp.up_proj` of block 3."""
    parts = name.removesuffix(".weight").split(".")
    numbers = [int(part) for part in parts if part.isdecimal()]
    return ".".join(part for part in parts if not part.isdecimal()), numbers[0] if numbers else 0


def shown_layers(names: Sequence[str], depths: Sequence[float] = (0.5,)) -> list[str]:
    """The layers that pictures show unasked: the query, key and up projections of some blocks.

    Args:
        names: Every masked tensor, in the model's order.
        depths: Which blocks, 0 the first and 1 the last of those with most of these layers.

    Returns:
        At most three names of each block; other kinds where a model has none of these.
    """
    blocks: dict[int, list[str]] = {}
    for name in names:
        blocks.setdefault(place_of(name)[1], []).append(name)
    choices = [_preferred(blocks[block]) for block in sorted(blocks)]
    wanted = [sum(kind_of(name) in _SHOWN_KINDS for name in choice) for choice in choices]
    best = [choice for choice, count in zip(choices, wanted, strict=True) if count == max(wanted)]
    chosen = (best[min(int(depth * len(best)), len(best) - 1)] for depth in depths)
    return list(dict.fromkeys(name for choice in chosen for name in choice))


def _preferred(names: Sequence[str]) -> list[str]:
    first = {kind_of(name): name for name in reversed(names)}
    kinds = [kind for kind in _SHOWN_KINDS if kind in first]
    return [first[kind] for kind in dict.fromkeys([*kinds, *map(kind_of, names)])][:3]
