"""`publish DIR --name owner/name`: an export made ready for the hub; with --push, put there."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roi_lightning.cli.options import parse_options
from roi_lightning.errors import UserError
from roi_lightning.export.card_metadata import Publication
from roi_lightning.export.publishing import check_login, check_name, publish, push
from roi_lightning.export.publishing.hub import base_card, licence_fields
from roi_lightning.export.publishing.provenance import hub_datasets, read_config, read_measured
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.export.verify import require_verified
from roi_lightning.utils.tables import print_table


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Verify an exported directory and write it with a full model card and without names of this machine's folders.

    Without --push nothing leaves this machine.

    Attributes:
        directory: An exported directory.
        name: The repository on the hub, OWNER/NAME.
        out: The directory to write (default: DIRECTORY-to-publish).
        overwrite: Replace an earlier directory there.
        push: Upload it, with your own login (hf auth login).
        private: If --push makes the repository, for its owner alone.
        license: An identifier of the hub (default: the base model's).
        base: The base model's hub id, OWNER/NAME, where it was read from files.
        language: Codes; may be repeated (default: the base model's).
        dataset: Of the text, OWNER/NAME; may be repeated.
        evaluation: What `evaluate --json` wrote.
        evaluated_as: What the directory is called there (default: the path to it).
    """

    directory: Path = field(kw_only=False)
    name: str
    out: Path | None = None
    overwrite: bool = False
    push: bool = False
    private: bool = False
    license: str | None = None
    base: str | None = None
    language: Sequence[str] = ()
    dataset: Sequence[str] = ()
    evaluation: Path | None = None
    evaluated_as: str | None = None


def main(argv: Sequence[str]) -> int:
    """Write the directory, list its files, and upload them or say how.

    Returns:
        0.

    Raises:
        UserError: If the directory does not verify, the licence is not known, the place can't be used, or, with
            --push, nobody is logged in.
    """
    options = parse_options(PublishOptions, "publish", argv)
    for name in filter(None, (options.name, options.base)):
        check_name(name)
    user = check_login() if options.push else None
    directory = options.directory.absolute()
    beside = directory.with_name(f"{directory.name}-to-publish")
    publication = _publication(options)
    out = publish(options.directory, publication, options.out or beside, overwrite=options.overwrite)
    _list(out)
    if user is None:
        last = f"nothing was uploaded; read its README.md, then: hf upload {options.name} {out}"
    else:
        last = f"uploaded as {user}: {push(out, options.name, options.private)}"
    sys.stdout.write(f"{out}: written and verified\n{last}\n")
    return 0


def _publication(options: PublishOptions) -> Publication:
    if options.evaluated_as and not options.evaluation:
        raise UserError("--evaluated_as names a model of --evaluation, which is not given; give both")
    directory, file = options.directory, options.evaluation
    require_verified(repr(str(directory)), directory)
    description = read_sidecar(directory)
    spec, revision = description["base"]["spec"], description["base"]["revision"]
    hub_id = options.base or (spec if revision else None)
    base = base_card(spec, hub_id, revision)
    return Publication(
        options.name,
        licence_fields(options.license, base, directory),
        hub_id,
        list(options.language) or _languages(base.language),
        list(options.dataset) or hub_datasets(description),
        read_measured(file, directory, options.evaluated_as) if file else None,
        read_config(directory, description),
    )


def _languages(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _list(out: Path) -> None:
    sizes = {path: path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
    rows = [[path.relative_to(out).as_posix(), f"{size:,}"] for path, size in sizes.items()]
    print_table(["file", "bytes"], [*rows, ["all", f"{sum(sizes.values()):,}"]], "for the hub")
