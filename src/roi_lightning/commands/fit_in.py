"""`plan --fit_in`: which options make a run fit into a device's memory."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from roi_lightning.errors import UserError
from roi_lightning.planning import Planner, Step

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The rest goes to the libraries, and to gaps between tensors.
_USABLE: Final = 0.95
# Two states of one byte each, and an fp32 scale for every 256.
_EIGHT_BIT: Final = 2 * (1 + 4 / 256)
_OVERLAY: Final = "overlays/adamw8bit.yaml"


@dataclass(frozen=True)
class Way:
    """One way to run.

    Attributes:
        step: How a step is made up.
        eight_bit: Whether the optimizer's states are kept in 8 bits instead of as configured.
        bytes: The most it holds at once, on one device.
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
    return int(float(match[1]) * (_BINARY if match[3] else _UNITS)[match[2].upper()])


def ways(planner: Planner, configured: Step, limit: int) -> list[Way]:
    """What was tried, the gentlest first; the last one fits, if any does.

    Smaller micro-batches cost some speed, checkpointing a third of the time, 8-bit states a little precision.
    """
    tried = []
    for eight_bit in (False, True):
        for step in _steps(configured):
            tried.append(_way(planner, step, eight_bit))
            if fits(tried[-1], limit):
                return tried
    return tried


def fits(way: Way, limit: int) -> bool:
    """Whether there is room for it, and for what else a process needs."""
    return way.bytes <= _USABLE * limit


def _steps(configured: Step) -> Iterator[Step]:
    for checkpointing in dict.fromkeys((configured.checkpointing, True)):
        step: Step | None = replace(configured, checkpointing=checkpointing)
        while step:
            yield step
            step = step.smaller()


def _way(planner: Planner, step: Step, eight_bit: bool) -> Way:
    state = min(_EIGHT_BIT, planner.state_bytes) if eight_bit else None
    return Way(step, eight_bit, planner.sizes(step, state)["total"])


def as_json(tried: list[Way], added: list[str], limit: int) -> dict[str, Any]:
    """For the plan's file; `arguments` is None if nothing fits."""
    return {
        "limit": limit,
        "usable": _USABLE,
        "tried": [asdict(way) for way in tried],
        "arguments": added if fits(tried[-1], limit) else None,
    }


def show(tried: list[Way], added: list[str], limit: int) -> None:
    """Print what was tried, and what to add to the command line.

    Raises:
        UserError: If nothing fits.
    """
    table = Table(title=f"to fit in {limit / 2**30:,.1f} GiB, of which {_USABLE:.0%} are counted on")
    for head in ("windows × micro-batches", "checkpointing", "optimizer's states", "at once", "fits"):
        table.add_column(head, justify="left" if head == "fits" else "right")
    for way in tried:
        table.add_row(
            f"{way.step.batch_size} × {way.step.accumulate}",
            "yes" if way.step.checkpointing else "no",
            "8 bits" if way.eight_bit else "as configured",
            f"{way.bytes / 2**30:,.2f} GiB",
            "yes" if fits(way, limit) else "no",
        )
    console = Console()
    console.print(table)
    if not fits(tried[-1], limit):
        least = min(way.bytes for way in tried)
        raise UserError(
            f"nothing tried fits in {limit / 2**30:,.1f} GiB: the least is {least / 2**30:,.1f} GiB, most of it what "
            "is learned, its gradients and the optimizer's states; prune fewer layers (model.targets) or take a "
            "larger device"
        )
    console.print("add to the command line:" if added else "it fits as it is", soft_wrap=True)
    if added:
        console.print(f"  {' '.join(added)}", soft_wrap=True, highlight=False)
