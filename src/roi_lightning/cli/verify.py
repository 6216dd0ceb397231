"""`verify DIR`: is an exported directory still what the export left?"""

import sys
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from roi_lightning.cli.arguments import VerifyOptions
from roi_lightning.errors import UserError
from roi_lightning.export import VerifyReport
from roi_lightning.export.formats import verify_directory
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.masks.mask_set import exported
from roi_lightning.models.source import resolve_model
from roi_lightning.utils.atomic_io import check_writable, write_json
from roi_lightning.utils.tables import print_table


def main(options: VerifyOptions) -> int:
    """Print a row per check.

    Returns:
        0 if every check holds, else 1.

    Raises:
        UserError: If there is no such directory or base model.
    """
    if options.json:
        check_writable(options.json)
    directory, base = exported(options.directory), None
    if options.base:
        base = resolve_model(options.base, commit=_revision(directory))
    report = verify_directory(directory, base)
    if options.json:
        write_json(options.json, report.to_json())
    _show(report)
    return 0 if report.ok else 1


def _revision(directory: Path) -> str | None:
    """The revision of the base model that a directory was made of."""
    with suppress(UserError):
        revision: str | None = read_sidecar(directory, None)["base"]["revision"]
        return revision
    return None


def _show(report: VerifyReport) -> None:
    marks = {True: Text("✓", "green"), False: Text("✗", "bold red")}
    rows: list[list[str | Text]] = [[check.name, marks[check.ok], check.detail] for check in report.checks]
    print_table(["check", "", "detail"], rows, left=3)
    count = len(report.checks)
    last = f"all {count} checks hold" if report.ok else f"{len(report.failures)} of {count} checks failed"
    sys.stdout.write(f"{report.directory}: {last}\n")
