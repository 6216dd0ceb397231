"""`publish DIR --name owner/name`: an export made ready for the hub; with --push, put there."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roi_lightning.export.publication import Publication


def build_parser() -> argparse.ArgumentParser:
    """The options of `publish`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning publish",
        description="Verify an exported directory and write it with a full model card and no name of a folder of "
        "this machine in it; without --push nothing leaves this machine.",
    )
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="an exported directory")
    add("--name", required=True, metavar="OWNER/NAME", help="the repository on the hub")
    add("--out", metavar="OUT", type=Path, help="the directory to write (default: DIR-to-publish)")
    add("--overwrite", action="store_true", help="replace an earlier directory at OUT")
    add("--push", action="store_true", help="upload it, with your own login (hf auth login)")
    add("--private", action="store_true", help="if --push makes the repository, for its owner alone")
    add("--license", help="an identifier of the hub (default: the base model's)")
    add("--base_model", metavar="OWNER/NAME", help="the base model's hub id, where it was read from files")
    add("--language", action="append", default=[], help="code; may be repeated (default: the base model's)")
    add("--dataset", action="append", default=[], metavar="OWNER/NAME", help="of the text; may be repeated")
    add("--evaluation", metavar="FILE", type=Path, help="what `evaluate --json` wrote")
    add("--evaluated_as", metavar="NAME", help="what DIR is called there (default: the path to it)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the directory, list its files, and upload them or say how.

    Returns:
        0.

    Raises:
        UserError: If the directory does not verify, the licence is not known, the place can't be used, or, with
            --push, nobody is logged in.
    """
    args = build_parser().parse_args(argv)
    from roi_lightning.publishing import check_login, check_name, publish, push

    for name in (args.name, *([args.base_model] if args.base_model else ())):
        check_name(name)
    user = check_login() if args.push else None
    out = publish(
        args.directory, _publication(args), args.out or _beside(args.directory), overwrite=args.overwrite
    )
    _list(out)
    _say(f"{out}: written and verified")
    if user is None:
        _say(f"nothing was uploaded; read its README.md, then: hf upload {args.name} {out}")
    else:
        _say(f"uploaded as {user}: {push(out, args.name, args.private)}")
    return 0


def _beside(directory: Path) -> Path:
    return directory.absolute().with_name(f"{directory.absolute().name}-to-publish")


def _publication(args: argparse.Namespace) -> "Publication":
    from roi_lightning.errors import UserError
    from roi_lightning.export.publication import Publication
    from roi_lightning.export.sidecar import read_sidecar
    from roi_lightning.export.verify import require_verified
    from roi_lightning.publishing.licence import base_card, licence_fields
    from roi_lightning.publishing.measured import read_measured
    from roi_lightning.publishing.provenance import command_of, hub_datasets, read_config

    if args.evaluated_as and not args.evaluation:
        raise UserError("--evaluated_as names a model of --evaluation, which is not given; give both")
    require_verified(repr(str(args.directory)), args.directory)
    description = read_sidecar(args.directory)
    spec, revision = description["base"]["spec"], description["base"]["revision"]
    hub_id, file = args.base_model or (spec if revision else None), args.evaluation
    config, base = read_config(args.directory, description), base_card(spec, hub_id, revision)
    return Publication(
        args.name,
        licence_fields(args.license, base, args.directory),
        hub_id,
        args.language or _languages(base.language),
        args.dataset or hub_datasets(description),
        read_measured(file, args.directory, args.evaluated_as) if file else None,
        command_of(description, config is not None),
        config,
    )


def _languages(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _list(out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    files = sorted(path for path in out.rglob("*") if path.is_file())
    table = Table("file", "bytes", title="for the hub")
    table.columns[1].justify = "right"
    for path in files:
        table.add_row(path.relative_to(out).as_posix(), f"{path.stat().st_size:,}")
    table.add_row("all", f"{sum(path.stat().st_size for path in files):,}")
    Console().print(table)


def _say(line: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(line), soft_wrap=True)
