"""`compare MASK MASK ... --out DIR`: how much of what one mask keeps the others keep too."""

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from roi_lightning.cli.compare_report import as_json, as_markdown, print_overlaps
from roi_lightning.cli.options import parse_options
from roi_lightning.errors import UserError
from roi_lightning.masks.comparison import Comparison, compare
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.masks.overlap import shown_layers
from roi_lightning.utils.atomic_io import check_writable, written_aside

_NAMED: Final = re.compile(r"([^=/\\]+)=(.+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Measure how much of what one mask keeps another keeps too (weights kept by both ÷ weights kept).

    Overall, by kind of layer, by layer. Writes overlap.json, overlap.md, masks.png (the corner of three layers, a
    column per mask) and overlap_by_layer.png.

    Attributes:
        mask: A mask file or an exported directory; NAME=PATH chooses the name to show.
        masks: Others.
        out: The folder to write to.
        json: Also write the overlaps as JSON there.
        reference: The one that the pictures measure against, by name or path (default: last).
        layers: Layers to show in masks.png: full names, their ends, or globs (default: q_proj, k_proj and
            up_proj of the middle block).
    """

    mask: str = field(kw_only=False)
    masks: list[str] = field(kw_only=False)
    out: Path
    json: Path | None = None
    reference: str | None = None
    layers: Sequence[str] = ()


def main(argv: Sequence[str]) -> int:
    """Compare every pair, print tables, write the files.

    Returns:
        0.

    Raises:
        UserError: If a mask can't be read, masks are of different patterns or layers, a name is unknown; then
            nothing has been written.
    """
    options = parse_options(CompareOptions, "compare", argv)
    out, paths = options.out, name_masks([options.mask, *options.masks])
    reference = _find_reference(options.reference, paths)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {str(out)!r} is a file; give a folder")
    for file in filter(None, (out / "overlap.json", options.json)):
        check_writable(file)
    comparison = compare(paths, reference)
    files = _render(comparison, options.layers)
    _warn_of_other_bases(comparison.masks)
    print_overlaps(comparison)
    contents = {out / name: content for name, content in files.items()}
    if options.json:
        contents[options.json] = files["overlap.json"]
    for path, content in contents.items():
        with written_aside(path) as partial:
            partial.write_bytes(content)
    sys.stdout.write(f"{out}: {', '.join(files)}\n")
    return 0


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


def _find_reference(wanted: str | None, paths: Mapping[str, str]) -> str:
    if wanted is None:
        return list(paths)[-1]
    same = (name for name, path in paths.items() if Path(path).resolve() == Path(wanted).resolve())
    found = wanted if wanted in paths else next(same, None)
    if found is None:
        raise UserError(f"--reference {wanted!r} is none of the masks: {', '.join(map(repr, paths))}")
    return found


def _render(comparison: Comparison, layers: Sequence[str]) -> dict[str, bytes]:
    """The content of every file, so that whatever fails does so before the first is written."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces that it builds a font cache
    from roi_lightning.plots import find_layers, layer_figure, mask_figure, to_png

    masks, reference = comparison.masks, comparison.reference
    names = list(masks[reference].layers)
    chosen = find_layers(names, layers) if layers else shown_layers(names)
    depth = layer_figure(comparison.with_reference(), reference, comparison.chance)
    return {
        "overlap.json": (json.dumps(as_json(comparison), indent=2) + "\n").encode(),
        "overlap.md": as_markdown(comparison).encode(),
        "masks.png": to_png(mask_figure(masks, reference, chosen)),
        "overlap_by_layer.png": to_png(depth),
    }


def _warn_of_other_bases(masks: Mapping[str, MaskSet]) -> None:
    (first, one), *rest = masks.items()
    for name, other in rest:
        if other.base.sha256 != one.base.sha256:
            sys.stderr.write(
                f"warning: masks of different base models: {first!r} of {one.base.spec} and {name!r} of "
                f"{other.base.spec} have other weights under the same names\n"
            )
