"""`apply MODEL MASK --out DIR`: a base model and a mask file make the directory that export made."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """The options of `apply`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning apply", description="Write a base model with a mask applied to it."
    )
    parser.add_argument("model", metavar="MODEL", help="the base model: hub id, directory, or GGUF file")
    parser.add_argument("mask", metavar="MASK", type=Path, help="a mask file or an exported directory")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export there")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="what a GGUF model is cast to (default: what the mask was made for)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the directory and say what it holds.

    Returns:
        0.

    Raises:
        UserError: If the mask is of another model, or the directory can't be written.
    """
    args = build_parser().parse_args(argv)
    from rich.console import Console
    from rich.text import Text

    from roi_lightning.export import write_export
    from roi_lightning.masks import MaskSet
    from roi_lightning.sources import resolve_model

    masks = MaskSet.load(args.mask)
    source = resolve_model(args.model, masks.base.revision)
    out = write_export(source, masks, args.out, dtype=args.dtype, overwrite=args.overwrite)
    line = f"{out}: {masks.pattern}, {masks.kept:,} of {masks.total:,} masked weights kept, verified"
    Console().print(Text(line), soft_wrap=True)
    return 0
