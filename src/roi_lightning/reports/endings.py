"""How runs ended: what stands first on a page if one did not end well, and the legs of one that was resumed."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from roi_lightning.reports.sources import Mask

PROGRAM: Final = "roi-lightning"


@dataclass(frozen=True)
class Alarm:
    """Why a run has not ended as it should have.

    Attributes:
        title: What happened, naming the run.
        message: The error in its own words; empty if there is none.
        advice: What to do.
        command: To type; empty if it is not known.
    """

    title: str
    message: str
    advice: str
    command: str


def alarms(masks: Sequence[Mask]) -> list[Alarm]:
    """What stands first on the page: runs that failed, were interrupted or were killed."""
    return [_alarm(mask) for mask in masks if mask.status != "finished"]


def _alarm(mask: Mask) -> Alarm:
    assert mask.record is not None
    leg = mask.record.legs[-1]
    at = f"at step {mask.last_step:,} of {int(leg.start['max_steps']):,}"
    message = str(leg.end["message"] or "") if leg.end else ""
    command = resume_command(mask)
    how = "this command" if command else "the same command as before and --resume auto"
    if mask.status == "failed":
        title = f"The run “{mask.name}” failed {at}"
        advice = f"Its mask is not finished. Change what the message names, then resume it with {how}."
    elif mask.status == "interrupted":
        title = f"The run “{mask.name}” was interrupted {at}"
        advice = f"Its mask is not finished. It resumes from its last checkpoint with {how}."
    else:
        title = f"The run “{mask.name}” has no end: its record stops {at}"
        advice = (
            "The process was killed (no memory, no power, a time limit), or is still running. If it is not, it "
            f"resumes from its last checkpoint with {how}."
        )
    return Alarm(title, message, advice, command)


def resume_command(mask: Mask) -> str:
    """The command that resumes a run; empty if it was not started by a command."""
    words = [str(word) for word in (mask.record.legs[-1].start["command"] or ())] if mask.record else []
    if words[:1] != ["fit"]:
        return ""
    kept = []
    skip = False
    for word in words:
        option = word.partition("=")[0]
        if not skip and option not in ("--resume", "--ckpt_path", "--overwrite"):
            kept.append(word)
        skip = word in ("--resume", "--ckpt_path")
    return shlex.join([PROGRAM, *kept, "--resume", "auto"])


def legs(mask: Mask) -> list[str]:
    """A sentence for every leg of a run that had several."""
    if mask.record is None or len(mask.record.legs) < 2:
        return []
    sentences = []
    for number, leg in enumerate(mask.record.legs, start=1):
        begun = "Started" if leg.start["resumed_from"] is None else "Resumed"
        last = number == len(mask.record.legs)
        status = mask.status if last else leg.status
        ended = f"{status} at step {int(leg.end['step']):,}" if leg.end else status
        first = f"{int(leg.start['step']):,} ({leg.start['time']})"
        text = f"{begun} at step {first} and {_ended(ended)}"
        message = f": {leg.end['message']}" if leg.end and leg.end.get("message") and not last else ""
        sentences.append(f"{text}{message}.")
    return sentences


def _ended(status: str) -> str:
    """`interrupted at step 20` → `was interrupted at step 20`."""
    return status if status.startswith(("finished", "failed")) else f"was {status}"
