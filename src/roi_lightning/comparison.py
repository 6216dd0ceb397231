"""How much of what each of several masks keeps the others keep too: every pair, as JSON, Markdown and tables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from roi_lightning.errors import UserError
from roi_lightning.masks import MaskSet, Overlap
from roi_lightning.progress import progress


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
        pattern = self.masks[self.reference].pattern
        return pattern.n / pattern.m

    @property
    def kinds(self) -> list[str]:
        """The kinds of layer."""
        return list(next(iter(self.pairs.values())).kinds)

    def matrix(self) -> list[list[str]]:
        """A row per mask: its name, and its overall overlap with every mask, in percent."""
        shares = {pair: overlap.all for pair, overlap in self.pairs.items()}
        shares |= {(b, a): share for (a, b), share in shares.items()} | {(a, a): 1.0 for a in self.masks}
        return [[a, *(_percent(shares[a, b]) for b in self.masks)] for a in self.masks]

    def by_kind(self) -> list[list[str]]:
        """A row per pair: its names, and its overlap overall and by kind of layer, in percent."""
        return [
            [f"{a} – {b}", *map(_percent, (overlap.all, *overlap.kinds.values()))]
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


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The overlap of every pair overall, by kind of layer and by layer, as shares of the kept weights."""
    rows = [
        {"a": a, "b": b, "all": overlap.all, "kinds": overlap.kinds, "layers": overlap.layers}
        for (a, b), overlap in comparison.pairs.items()
    ]
    return {
        "overlap": rows,
        "pattern": comparison.pattern,
        "masks": comparison.paths,
        "reference": comparison.reference,
    }


def as_markdown(comparison: Comparison) -> str:
    """A page of tables in percent; it shows the pictures that the command puts beside it."""
    others = {name: overlap.layers for name, overlap in comparison.with_reference().items()}
    layers = comparison.masks[comparison.reference].layers
    by_layer = [[name, *(_percent(overlap[name]) for overlap in others.values())] for name in layers]
    parts = [
        f"# Overlap of {comparison.pattern} masks",
        "Weights kept by both masks ÷ weights kept, in percent. "
        f"Two unrelated masks share {_percent(comparison.chance)}.",
        _table(["mask", "file"], [[name, path] for name, path in comparison.paths.items()]),
        *("## Overall", _table(["", *comparison.masks], comparison.matrix())),
        *("## By kind of layer", _table(["pair", "all", *comparison.kinds], comparison.by_kind())),
        f"## By layer, with {_escaped(comparison.reference)}",
        "![Overlap by block](overlap_by_layer.png)",
        _table(["layer", *others], by_layer),
        *("## Corners", "![Corners of the masks](masks.png)"),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    numbers = all(re.fullmatch(r"[\d.]+", cell) for row in rows for cell in row[1:])
    rule = ["---", *(["---:" if numbers else "---"] * (len(head) - 1))]
    lines = [map(_escaped, head), rule, *(map(_escaped, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*<>|$\[\]])", r"\\\1", " ".join(text.split()))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def as_tables(comparison: Comparison) -> list[Table]:
    """What to print on a terminal: the matrix where there are more than two masks, and every pair by kind."""
    tables = [_matrix(comparison)] if len(comparison.masks) > 2 else []
    return [*tables, _kinds(comparison)]


def _matrix(comparison: Comparison) -> Table:
    title = f"{comparison.pattern}: kept by both ÷ kept, %"
    return _rich_table(title, ["", *comparison.masks], comparison.matrix())


def _kinds(comparison: Comparison) -> Table:
    ending = _shared_ending(comparison.kinds)
    title = f"{comparison.pattern}: by kind of layer{ending and f' (…{ending})'}, %"
    kinds = [kind.removesuffix(ending) for kind in comparison.kinds]
    return _rich_table(title, ["pair", "all", *kinds], comparison.by_kind())


def _shared_ending(kinds: Sequence[str]) -> str:
    """The `_proj` of `q_proj`, `up_proj` and the like: without it the table fits 80 columns."""
    ending = kinds[0][kinds[0].rfind("_") :] if "_" in kinds[0] else ""
    return ending if all(kind.endswith(ending) and kind != ending for kind in kinds) else ""


def _rich_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=Text(title), box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for i, name in enumerate(head):
        table.add_column(Text(name), justify="right" if i else "left", overflow="fold", min_width=5)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
