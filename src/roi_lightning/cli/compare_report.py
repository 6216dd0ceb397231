"""A comparison of masks as JSON, Markdown, and tables on a terminal."""

import re
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD

from roi_lightning.masks.comparison import Comparison, percent
from roi_lightning.utils.tables import markdown_table, print_table


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The overlap of every pair overall, by kind of layer and by layer, as fractions of the kept weights."""
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
    by_layer = [[name, *(percent(overlap[name]) for overlap in others.values())] for name in layers]
    parts = [
        f"# Overlap of {comparison.pattern} masks",
        "Weights kept by both masks ÷ weights kept, in percent. "
        f"Two unrelated masks share {percent(comparison.chance)}.",
        _table(["mask", "file"], [list(pair) for pair in comparison.paths.items()], left=2),
        *("## Overall", _table(["", *comparison.masks], comparison.matrix())),
        *("## By kind of layer", _table(["pair", "all", *comparison.kinds], comparison.by_kind())),
        f"## By layer, with {_escaped(comparison.reference)}",
        "![Overlap by block](overlap_by_layer.png)",
        _table(["layer", *others], by_layer),
        *("## Corners", "![Corners of the masks](masks.png)"),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    return markdown_table([*map(_escaped, head)], [[*map(_escaped, row)] for row in rows], left)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*<>$\[\]])", r"\\\1", " ".join(text.split()))


def print_overlaps(comparison: Comparison) -> None:
    """Print the matrix where there are more than two masks, and every pair by kind of layer."""
    if len(comparison.masks) > 2:
        title = f"{comparison.pattern}: kept by both ÷ kept, %"
        print_table(["", *comparison.masks], comparison.matrix(), title, box=SIMPLE_HEAD)
    ending = _shared_ending(comparison.kinds)
    title = f"{comparison.pattern}: by kind of layer{ending and f' (…{ending})'}, %"
    kinds = [kind.removesuffix(ending) for kind in comparison.kinds]
    print_table(["pair", "all", *kinds], comparison.by_kind(), title, box=SIMPLE_HEAD)


def _shared_ending(kinds: Sequence[str]) -> str:
    """The `_proj` of `q_proj`, `up_proj` and the like: without it the table fits 80 columns."""
    ending = kinds[0][kinds[0].rfind("_") :] if "_" in kinds[0] else ""
    return ending if all(kind.endswith(ending) and kind != ending for kind in kinds) else ""
