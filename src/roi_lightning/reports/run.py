"""Read what a run has left in its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from roi_lightning.errors import UserError
from roi_lightning.learning.run_folder import BEFORE, MASK, REPORT, SUMMARY
from roi_lightning.masks.mask_set import MaskSet

Curve = list[tuple[int, float]]
_EVENTS: Final = "events.out.tfevents.*"


@dataclass(frozen=True)
class Run:
    """Holds what a run has left; each part is empty or None where the run has not written it.

    Attributes:
        summary: `summary.json`, from `BaselineSummary`.
        facts: `report.json`, from `Report`.
        curves: Of TensorBoard's log, by tag: optimizer steps and values.
        before: The mask before learning.
        learned: The learned mask.
    """

    summary: dict[str, Any]
    facts: dict[str, Any]
    curves: dict[str, Curve]
    before: MaskSet | None
    learned: MaskSet | None


def read_run(folder: Path) -> Run:
    """Read what a run has left.

    Args:
        folder: Of the run, which may still go on.

    Raises:
        UserError: If there is nothing, or a file is damaged.
    """
    run = Run(
        _read_json(folder / SUMMARY),
        _read_json(folder / REPORT),
        _read_curves(folder),
        *(MaskSet.load(folder / name) if (folder / name).exists() else None for name in (BEFORE, MASK)),
    )
    if not (run.summary or run.facts or run.curves or run.learned):
        raise UserError(f"{str(folder)!r} has nothing to report; give the folder of a run")
    return run


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{str(path)!r} is damaged ({error}); move it away") from error
    return content


def _read_curves(folder: Path) -> dict[str, Curve]:
    """Read all legs of a run that was resumed; where two have a step, the later counts."""
    if not any(folder.glob(_EVENTS)):
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
