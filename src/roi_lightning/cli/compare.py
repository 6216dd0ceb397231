"""`compare MASK MASK ... --out DIR`: how much of what one mask keeps the others keep too."""

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD

from roi_lightning.cli.arguments import CompareOptions
from roi_lightning.errors import UserError, user_path
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.masks.overlap import Overlap, shown_layers
from roi_lightning.utils.atomic_io import check_writable, write_json, written_aside
from roi_lightning.utils.progress import progress
from roi_lightning.utils.tables import print_table

_NAMED: Final = re.compile(r"([^=/\\]+)=(.+)", re.DOTALL)


def main(options: CompareOptions) -> None:
    """Compare every pair, print the table, write the files.

    Raises:
        UserError: If there is one mask only or one can't be read, masks are of different patterns or layers, a name
            is unknown; then nothing has been written.
    """
    if len(options.masks) == 1:
        raise UserError(f"{options.masks[0]!r} is one mask; give two or more: compare MASK MASK --out DIR")
    paths = name_masks(options.masks)
    jsons = [path for path in (options.out / "overlap.json", options.json) if path]
    for path in jsons:
        check_writable(path)
    masks = {name: MaskSet.load(user_path(path)) for name, path in progress([*paths.items()], "reading")}
    overlaps = _overlaps(masks)
    picture = _draw(masks)
    for path in jsons:
        write_json(path, _as_json(overlaps, masks, paths))
    with written_aside(options.out / "masks.png") as partial:
        partial.write_bytes(picture)
    (first, one), *rest = masks.items()
    for name, other in rest:
        if other.base.sha256 != one.base.sha256:
            sys.stderr.write(
                f"warning: masks of different base models: {first!r} of {one.base.spec} and {name!r} of "
                f"{other.base.spec} have other weights under the same names\n"
            )
    _print(overlaps, one)
    sys.stdout.write(f"{options.out}: overlap.json, masks.png\n")


def _overlaps(masks: Mapping[str, MaskSet]) -> dict[tuple[str, str], Overlap]:
    """Measure the overlap of every pair, in the order of the masks."""
    overlaps = {}
    for a, b in progress([*combinations(masks, 2)], "comparing"):
        try:
            overlaps[a, b] = masks[a].overlap(masks[b])
        except UserError as error:
            raise UserError(f"{a!r} and {b!r}: {error}") from error
    return overlaps


def _as_json(
    overlaps: Mapping[tuple[str, str], Overlap], masks: Mapping[str, MaskSet], paths: Mapping[str, str]
) -> dict[str, Any]:
    """Spell the overlap of every pair overall, by kind and by layer, as fractions of the kept weights."""
    rows = [
        {"a": a, "b": b, "all": overlap.all, "kinds": overlap.kinds, "layers": overlap.layers}
        for (a, b), overlap in overlaps.items()
    ]
    *_, reference = masks
    return {
        "overlap": rows,
        "pattern": str(masks[reference].pattern),
        "masks": dict(paths),
        "reference": reference,
    }


def _print(overlaps: Mapping[tuple[str, str], Overlap], masks: MaskSet) -> None:
    """Print a row for each pair, in percent, and what two unrelated masks would share."""
    layers = masks.layers.values()
    chance = sum(x.kept**2 / x.total for x in layers) / sum(x.kept for x in layers)
    kinds = list(next(iter(overlaps.values())).kinds)
    rows = [
        [f"{a} – {b}", *(f"{100 * share:.1f}" for share in (overlap.all, *overlap.kinds.values()))]
        for (a, b), overlap in overlaps.items()
    ]
    title = f"{masks.pattern}: kept by both ÷ kept, % ({100 * chance:.1f} by chance)"
    # Without the `_proj` of `q_proj` and the like it fits 80 columns.
    print_table(
        ["pair", "all", *(kind.removesuffix("_proj") for kind in kinds)], rows, title, box=SIMPLE_HEAD
    )


def name_masks(arguments: Sequence[str]) -> dict[str, str]:
    """Split `NAME=PATH`, and name what has no name after its file or folder.

    Args:
        arguments: As typed. One that exists as it stands is a path, whatever it contains.

    Returns:
        Path as typed by name, in the same order. Names that would collide become the paths as typed.

    Raises:
        UserError: If two masks are given the same name, or one path is given twice without names.
    """
    given = [
        (argument, None if Path(argument).exists() else _NAMED.fullmatch(argument)) for argument in arguments
    ]
    labels = [match[1] if match else _default_name(argument) for argument, match in given]
    paths = [match[2] if match else argument for argument, match in given]
    names = [
        path if match is None and labels.count(label) > 1 else label
        for (_, match), label, path in zip(given, labels, paths, strict=True)
    ]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two masks are called {name!r}; tell them apart with NAME=PATH")
    return dict(zip(names, paths, strict=True))


def _default_name(argument: str) -> str:
    path = Path(argument).absolute()
    if path.is_dir():
        return path.resolve().name or argument
    return (path.parent.name if path.name == MASK_FILE else path.stem) or argument


def _draw(masks: Mapping[str, MaskSet]) -> bytes:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces that it builds a font cache
    from roi_lightning.reports.corners import mask_figure
    from roi_lightning.reports.style import to_png

    *_, reference = masks
    return to_png(mask_figure(masks, reference, shown_layers(list(masks[reference].layers))))
