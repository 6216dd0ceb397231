"""The record of a run: a JSON line when it starts, for what it measures, and when it ends.

Lines are appended while a run goes, so that one that is killed has left its record, too. A run that resumes appends
to the same file: each start begins another leg. A leg without an end was killed.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roi_lightning.errors import UserError
from roi_lightning.reports.run_files import RECORD

Kind = Literal["start", "metrics", "end"]
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Leg:
    """A run from its start, or from where it resumed, to where it ended.

    Attributes:
        start: The fields of its first line: time, step, resumed_from, command, max_steps, seed, commit, versions,
            machine, run.
        end: Those of its last line: time, status, step, message, seconds; None if it was killed.
    """

    start: dict[str, Any]
    end: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """`finished`, `interrupted`, `failed`, or `killed`."""
        return str(self.end["status"]) if self.end else "killed"


@dataclass(frozen=True)
class RunRecord:
    """What a run has recorded.

    Attributes:
        legs: From first to last; at least one.
        curves: By tag, (optimizer step, value) in the order of steps. Of a leg that went further than the step at
            which a later one began, the rest is left out; where both have a value, the later counts.
    """

    legs: list[Leg]
    curves: dict[str, Curve]


def append(path: Path, kind: Kind, fields: Mapping[str, Any]) -> None:
    """Append a line.

    Args:
        path: The file; made if there is none.
        kind: `start`, `metrics` or `end`.
        fields: What it says, JSON values; NaN and infinities become the strings `nan`, `inf` and `-inf`.

    Raises:
        UserError: If the file can't be written.
    """
    line = json.dumps(_spelled({"kind": kind, **fields}), allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = kind == "start" and _is_torn(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n" if torn else f"{line}\n")
    except OSError as error:
        raise UserError(
            f"{str(path)!r} can't be written: {error}; make room or choose another place"
        ) from error


def read_record(folder: Path) -> RunRecord:
    """Read the record of a run.

    Args:
        folder: Of the run.

    Raises:
        UserError: If there is none, or a line of it is damaged; the last one of a leg that was killed may be.
    """
    legs: list[Leg] = []
    curves: dict[str, dict[int, float]] = {}
    for entry in _entries(folder / RECORD):
        if entry["kind"] == "start":
            legs.append(Leg(entry))
            _rewind(curves, entry)
        elif entry["kind"] == "end":
            legs[-1] = Leg(legs[-1].start, entry)
        else:
            for tag, value in entry["values"].items():
                curves.setdefault(tag, {})[entry["step"]] = float(value)
    return RunRecord(legs, {tag: sorted(values.items()) for tag, values in curves.items() if values})


def _rewind(curves: dict[str, dict[int, float]], start: Mapping[str, Any]) -> None:
    """Drop what a leg does not continue: everything, if it began anew."""
    kept = start["step"] if start["resumed_from"] else -1
    for values in curves.values():
        for step in [step for step in values if step > kept]:
            del values[step]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{str(path)!r} can't be read: {error}; give the folder of a run") from error
    entries = [_parsed(line) for line in lines]
    if not entries or entries[0] is None or entries[0]["kind"] != "start":
        raise UserError(f"{str(path)!r} does not begin with the start of a run; give the folder of a run")
    for number, entry in enumerate(entries, start=1):
        if entry is not None:
            yield entry
        elif not _ends_a_leg(entries, number):
            raise UserError(f"line {number} of {str(path)!r} is damaged; take the file from a backup")


def _ends_a_leg(entries: list[dict[str, Any] | None], number: int) -> bool:
    """Whether a leg that was killed may have left this line."""
    following = entries[number] if number < len(entries) else {"kind": "start"}
    return following is not None and following["kind"] == "start"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and entry.get("kind") in ("start", "metrics", "end") else None


def _is_torn(path: Path) -> bool:
    """Whether a process was killed in the middle of the last line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _spelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _spelled(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
