"""How much of what each of several masks keeps the others keep too: every pair."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from roi_lightning.errors import UserError
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.overlap import Overlap
from roi_lightning.utils.progress import progress


@dataclass(frozen=True)
class Comparison:
    """What was compared: masks and paths by name, and the overlap of every pair, in the order given."""

    masks: dict[str, MaskSet]
    paths: dict[str, str]
    reference: str
    pairs: dict[tuple[str, str], Overlap]

    @property
    def pattern(self) -> str:
        """Of all masks, like `2:4`."""
        return str(self.masks[self.reference].pattern)

    @property
    def chance(self) -> float:
        """What two unrelated masks share."""
        layers = self.masks[self.reference].layers.values()
        return sum(x.kept**2 / x.total for x in layers) / sum(x.kept for x in layers)

    @property
    def kinds(self) -> list[str]:
        """The kinds of layer."""
        return list(next(iter(self.pairs.values())).kinds)

    def matrix(self) -> list[list[str]]:
        """A row per mask: its name, and its overall overlap with every mask, in percent."""
        fractions = {pair: overlap.all for pair, overlap in self.pairs.items()}
        fractions |= {(b, a): fraction for (a, b), fraction in fractions.items()} | {
            (a, a): 1.0 for a in self.masks
        }
        return [[a, *(percent(fractions[a, b]) for b in self.masks)] for a in self.masks]

    def by_kind(self) -> list[list[str]]:
        """A row per pair: its names, and its overlap overall and by kind of layer, in percent."""
        return [
            [f"{a} – {b}", *map(percent, (overlap.all, *overlap.kinds.values()))]
            for (a, b), overlap in self.pairs.items()
        ]

    def with_reference(self) -> dict[str, Overlap]:
        """The overlap of every other mask with the reference."""
        return {
            next(name for name in pair if name != self.reference): overlap
            for pair, overlap in self.pairs.items()
            if self.reference in pair
        }


def compare(paths: Mapping[str, str], reference: str) -> Comparison:
    """Read masks and measure every pair.

    Args:
        paths: Mask files or exported directories, by the name to show.
        reference: One of these names.

    Raises:
        UserError: If a mask can't be read, or two are of different patterns or layers.
    """
    masks = {
        name: MaskSet.load(Path(path).expanduser()) for name, path in progress(list(paths.items()), "reading")
    }
    pairs = {}
    for a, b in progress(list(combinations(masks, 2)), "comparing"):
        try:
            pairs[a, b] = masks[a].overlap(masks[b])
        except UserError as error:
            raise UserError(f"{a!r} and {b!r}: {error}") from error
    return Comparison(masks, dict(paths), reference, pairs)


def percent(fraction: float) -> str:
    """A fraction in percent, to a tenth."""
    return f"{100 * fraction:.1f}"
