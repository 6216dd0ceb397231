"""`doctor`: what of this machine decides how fast a run is, and what works here."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from roi_lightning.cli.doctor_probes import Finding, Status, find_out
from roi_lightning.cli.options import parse_options
from roi_lightning.utils.tables import print_table

_MARKS: Final[dict[Status, tuple[str, str]]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "error": ("✗", "bold red"),
}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Say what this machine has, and what that means for speed and for what works; for bug reports, too.

    Nothing is fetched, and no token or home folder is shown.

    Attributes:
        json: Also write the same as JSON there.
    """

    json: Path | None = None


def main(argv: Sequence[str]) -> int:
    """Print a row per check.

    Returns:
        0 if a run can work here, 1 if something that every run needs is broken.

    Raises:
        UserError: If the JSON can't be written.
    """
    options = parse_options(DoctorOptions, "doctor", argv)
    if options.json:
        from roi_lightning.utils.atomic_io import check_writable, write_json

        check_writable(options.json)
    findings = find_out()
    _show(findings)
    if options.json:
        write_json(options.json, as_json(findings))
    return 1 if _broken(findings) else 0


def as_json(findings: Mapping[str, Finding]) -> dict[str, Any]:
    """What `--json` writes.

    Returns:
        `works`, whether a run can work here, and `checks`, a dictionary by the names of the table's rows (with
        underscores). Each has `status` (`ok`, `warning`, `error`), `found` and `means`, which are the table's words,
        and `facts`: versions, paths, sizes in bytes; empty if the check itself failed.
    """
    checks = {name: asdict(finding) for name, finding in findings.items()}
    return {"works": not _broken(findings), "checks": checks}


def _show(findings: Mapping[str, Finding]) -> None:
    rows: list[list[str | Text]] = [
        [name.replace("_", " "), Text(*_MARKS[finding.status]), finding.found, finding.means]
        for name, finding in findings.items()
    ]
    print_table(["check", "", "found", "means"], rows, left=4)
    limits = sum(finding.status == "warning" for finding in findings.values())
    broken = ", ".join(name.replace("_", " ") for name in _broken(findings))
    works = f"no run can work here before this is mended: {broken}" if broken else "a run can work here"
    sys.stdout.write(f"{works}; ! marks {limits} limits\n" if limits else f"{works}\n")


def _broken(findings: Mapping[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.status == "error"]
