"""`compare MASK MASK ... --out DIR`: how much of what one mask keeps the others keep too."""

import argparse
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from roi_lightning.errors import UserError

if TYPE_CHECKING:
    from roi_lightning.comparison import Comparison
    from roi_lightning.masks import MaskSet

_MASK_FILE: Final = "roi_mask.safetensors"  # masks.MASK_FILE, without importing torch for --help
_NAMED: Final = re.compile(r"([^=/\\]+)=(.+)", re.DOTALL)
_PIPED_WIDTH: Final = 160


def build_parser() -> argparse.ArgumentParser:
    """The options of `compare`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning compare",
        description="Measure how much of what one mask keeps another keeps too (weights kept by both ÷ weights "
        "kept): overall, by kind of layer, by layer. Writes overlap.json, overlap.md, masks.png (the corner of "
        "three layers, a column per mask) and overlap_by_layer.png.",
    )
    parser.add_argument(
        "masks",
        metavar="MASK",
        nargs="+",
        help="a mask file or an exported directory; NAME=PATH chooses the name to show",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--json", metavar="OUT", type=Path, help="also write the overlaps as JSON there")
    parser.add_argument(
        "--reference",
        metavar="MASK",
        help="the one that the pictures measure against, by name or path (default: last)",
    )
    parser.add_argument(
        "--layers",
        metavar="NAME",
        nargs="+",
        help="layers to show in masks.png: names or globs, whole or from the end (default: q_proj, k_proj and "
        "up_proj of the middle block)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Compare every pair, print tables, write the files.

    Returns:
        0.

    Raises:
        UserError: If a mask can't be read, masks are of different patterns or layers, or a name is unknown; then
            nothing has been written.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if len(args.masks) < 2:
        parser.error("compare needs at least two masks")
    from rich.console import Console
    from rich.text import Text

    paths = name_masks(args.masks)
    reference = _find_reference(args.reference, paths)
    _check_places(args.out, args.json)
    from roi_lightning.comparison import compare

    comparison = compare(paths, reference)
    files = _render(comparison, args.layers)
    _warn_of_other_bases(comparison.masks)
    _show(comparison)
    for name, content in files.items():
        _write(args.out / name, content)
    if args.json:
        _write(args.json, files["overlap.json"])
    Console().print(Text(f"{args.out}: {', '.join(files)}"), soft_wrap=True)
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
    return (path.parent.name if path.name == _MASK_FILE else path.stem) or argument


def _find_reference(wanted: str | None, paths: Mapping[str, str]) -> str:
    if wanted is None:
        return list(paths)[-1]
    same = (name for name, path in paths.items() if Path(path).resolve() == Path(wanted).resolve())
    found = wanted if wanted in paths else next(same, None)
    if found is None:
        raise UserError(f"--reference {wanted!r} is none of the masks: {', '.join(map(repr, paths))}")
    return found


def _check_places(out: Path, json_file: Path | None) -> None:
    from roi_lightning.atomic import check_writable

    if out.exists() and not out.is_dir():
        raise UserError(f"--out {str(out)!r} is a file; give a folder")
    for file in filter(None, (out / "overlap.json", json_file)):
        check_writable(file)


def _render(comparison: "Comparison", layers: Sequence[str] | None) -> dict[str, bytes]:
    """The content of every file, so that whatever fails does so before the first is written."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces that it builds a font cache
    from roi_lightning.comparison import as_json, as_markdown
    from roi_lightning.figures import find_layers, layer_figure, mask_figure, shown_layers, to_png

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


def _warn_of_other_bases(masks: "Mapping[str, MaskSet]") -> None:
    (first, one), *rest = masks.items()
    for name, other in rest:
        if other.base.sha256 != one.base.sha256:
            sys.stderr.write(
                f"warning: masks of different base models: {first!r} of {one.base.spec} and {name!r} of "
                f"{other.base.spec} have other weights under the same names\n"
            )


def _show(comparison: "Comparison") -> None:
    from rich.console import Console

    from roi_lightning.comparison import as_tables

    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    for table in as_tables(comparison):
        console.print(table)


def _write(path: Path, content: bytes) -> None:
    from roi_lightning.atomic import written_aside

    with written_aside(path) as partial:
        partial.write_bytes(content)
