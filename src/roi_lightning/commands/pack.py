"""`pack DIR --out DIR`: a 2:4 export in fewer bytes, for `runtime.from_packed`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roi_lightning.runtime.checkpoint import PackedSizes


def build_parser() -> argparse.ArgumentParser:
    """The options of `pack`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning pack",
        description="Write a verified 2:4 directory again with kept weights and two bits for the place of each, "
        "which roi_lightning.runtime.from_packed loads.",
    )
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="a 2:4 directory of fit, export, prune or apply"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier directory there")
    parser.add_argument("--json", metavar="OUT", type=Path, help="also write the sizes as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Pack, unpack again, and say what it saves.

    Returns:
        0.

    Raises:
        UserError: If the directory can't be packed, or a file can't be written.
    """
    args = build_parser().parse_args(argv)
    from roi_lightning.atomic import check_writable, written_aside
    from roi_lightning.runtime import write_packed

    if args.json:
        check_writable(args.json)
    sizes = write_packed(args.directory, args.out, overwrite=args.overwrite)
    _show(sizes, args.out)
    if args.json:
        with written_aside(args.json) as partial:
            partial.write_text(json.dumps(sizes.to_json(), indent=2) + "\n", encoding="utf-8")
    return 0


def _show(sizes: "PackedSizes", out: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "before, MB", "after, MB", "ratio")
    for name, before, after in (
        (f"{sizes.layers} masked tensors", sizes.linears, sizes.packed),
        ("all files", sizes.before, sizes.after),
    ):
        table.add_row(name, f"{before / 1e6:,.2f}", f"{after / 1e6:,.2f}", f"{after / before:.4f}")
    console = Console()
    console.print(table)
    console.print(Text(f"{out}: unpacks to the same bytes"), soft_wrap=True)
