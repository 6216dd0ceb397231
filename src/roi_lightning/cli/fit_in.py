"""`plan --fit_in`: which options make a run fit into a device's memory."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from roi_lightning.errors import UserError
from roi_lightning.learning.memory_plan import Planner, Step
from roi_lightning.utils.tables import print_table

# The rest goes to the libraries, and to gaps between tensors.
USABLE: Final = 0.95
# Two states of one byte each, and an fp32 scale for every 256.
_EIGHT_BIT: Final = 2 * (1 + 4 / 256)
_OVERLAY: Final = "overlays/adamw8bit.yaml"


@dataclass(frozen=True)
class Candidate:
    """Settings to try.

    Attributes:
        step: How a step is made up.
        eight_bit: Whether the optimizer's states are kept in 8 bits instead of as configured.
        bytes: Peak memory, on one device.
    """

    step: Step
    eight_bit: bool
    bytes: int

    def arguments(self, configured: Step, counts: Mapping[str, int]) -> list[str]:
        """What to add to the command line of `fit`, for as many windows per step and as many validations.

        Args:
            configured: The step as it is configured.
            counts: The options that count micro-batches of the configured size, and their values.
        """
        words = []
        if self.eight_bit:
            words += ["--config", _OVERLAY]
        if self.step.batch_size != configured.batch_size:
            words += ["--data.batch_size", str(self.step.batch_size)]
            times = self.step.accumulate // configured.accumulate
            words += [word for name, count in counts.items() for word in (name, str(count * times))]
        if self.step.checkpointing != configured.checkpointing:
            words += ["--model.activation_checkpointing", "true"]
        return words


def parse_size(text: str) -> int:
    """`80GB` (a thousand to the kilo) or `80GiB` (1,024) in bytes.

    Raises:
        UserError: If it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UserError(f"--fit_in {text!r} is no size; give it like 80GB or 22GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def candidate_settings(planner: Planner, configured: Step, limit: int) -> list[Candidate]:
    """What was tried, the gentlest first; the last one fits, if any does.

    Smaller micro-batches cost some speed, checkpointing a third of the time, 8-bit states a little precision.
    """
    tried = []
    for eight_bit in (False, True):
        for step in _steps(configured, planner.learner.differentiates):
            tried.append(_candidate(planner, step, eight_bit))
            if fits(tried[-1], limit):
                return tried
    return tried


def fits(candidate: Candidate, limit: int) -> bool:
    """Whether memory suffices for it, and for what else a process needs."""
    return candidate.bytes <= USABLE * limit


def _steps(configured: Step, may_checkpoint: bool) -> Iterator[Step]:
    for checkpointing in dict.fromkeys((configured.checkpointing, may_checkpoint)):
        step: Step | None = replace(configured, checkpointing=checkpointing)
        while step:
            yield step
            step = step.smaller()


def _candidate(planner: Planner, step: Step, eight_bit: bool) -> Candidate:
    state = min(_EIGHT_BIT, planner.state_bytes) if eight_bit else None
    return Candidate(step, eight_bit, planner.sizes(step, state)["total"])


def as_json(tried: list[Candidate], added: list[str], limit: int) -> dict[str, Any]:
    """For the plan's file; `arguments` is None if nothing fits."""
    return {
        "limit": limit,
        "usable": USABLE,
        "tried": [asdict(candidate) for candidate in tried],
        "arguments": added if fits(tried[-1], limit) else None,
    }


def show(tried: list[Candidate], added: list[str], limit: int) -> None:
    """Print what was tried, and what to add to the command line.

    Raises:
        UserError: If nothing fits.
    """
    rows = [
        [
            f"{candidate.step.batch_size} × {candidate.step.accumulate}",
            "yes" if candidate.step.checkpointing else "no",
            "8 bits" if candidate.eight_bit else "as configured",
            f"{candidate.bytes / 2**30:,.2f} GiB",
            "yes" if fits(candidate, limit) else "no",
        ]
        for candidate in tried
    ]
    head = ["windows × micro-batches", "checkpointing", "optimizer's states", "peak", "fits"]
    print_table(
        head, rows, f"to fit in {limit / 2**30:,.1f} GiB, of which {USABLE:.0%} are counted on", left=0
    )
    if not fits(tried[-1], limit):
        lowest = min(candidate.bytes for candidate in tried)
        raise UserError(
            f"nothing tried fits in {limit / 2**30:,.1f} GiB: the least is {lowest / 2**30:,.1f} GiB, most of it "
            "what is learned, its gradients and the optimizer's states; prune fewer layers (model.targets) or take a "
            "larger device"
        )
    last = f"add to the command line:\n  {' '.join(added)}" if added else "it fits as it is"
    sys.stdout.write(f"{last}\n")
