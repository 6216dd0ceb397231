"""`verify DIR`: is an exported directory still what the export left?"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roi_lightning.export import VerifyReport


def build_parser() -> argparse.ArgumentParser:
    """The options of `verify`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning verify",
        description="Check N:M along the input dimension, exact zeros and every file's hash; with --base "
        "also that the survivors are bit for bit the base model's and nothing else changed.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="an exported or packed directory")
    parser.add_argument("--base", metavar="MODEL", help="the base model: hub id, directory, or GGUF file")
    parser.add_argument("--json", metavar="OUT", type=Path, help="also write the result as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print a row per check.

    Returns:
        0 if every check holds, else 1.

    Raises:
        UserError: If there is no such directory or base model.
    """
    args = build_parser().parse_args(argv)
    from roi_lightning.atomic import check_writable, written_aside
    from roi_lightning.export import verify_export
    from roi_lightning.runtime import verify_packed
    from roi_lightning.sources import is_packed, resolve_model

    if args.json:
        check_writable(args.json)
    base = resolve_model(args.base, _revision(args.directory)) if args.base else None
    verify = verify_packed if is_packed(args.directory) else verify_export
    report = verify(args.directory, base)
    _show(report)
    if args.json:
        with written_aside(args.json) as partial:
            partial.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


def _revision(directory: Path) -> str | None:
    from roi_lightning.errors import UserError
    from roi_lightning.export.sidecar import EXPORTED, PACKED, read_sidecar

    try:
        revision: str | None = read_sidecar(directory, (EXPORTED, PACKED))["base"]["revision"]
    except UserError:
        return None
    return revision


def _show(report: "VerifyReport") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", "detail")
    for check in report.checks:
        mark = Text("✓", "green") if check.ok else Text("✗", "bold red")
        table.add_row(check.name, mark, Text(check.detail))
    console = Console(soft_wrap=False)
    console.print(table)
    count = len(report.checks)
    last = f"all {count} checks hold" if report.ok else f"{len(report.failures)} of {count} checks failed"
    console.print(Text(f"{report.directory}: {last}"), soft_wrap=True)
