"""How much of what one mask keeps another keeps too: overall, by kind of layer, by layer."""

from collections.abc import Mapping
from dataclasses import dataclass


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
