"""Time and memory of alternatives, taken in turns so that a busy moment hits all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Task = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """One alternative against its reference.

    Attributes:
        name: As in the table and the JSON.
        pattern: N:M, empty where it plays no part.
        seconds: One per round.
        reference: The reference's name.
        reference_seconds: One per round.
        more: Other figures, by name.
    """

    name: str
    pattern: str
    seconds: list[float]
    reference: str
    reference_seconds: list[float]
    more: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """Median ÷ the reference's median."""
        return median(self.seconds) / median(self.reference_seconds)

    def to_json(self) -> dict[str, Any]:
        """A row of the JSON."""
        return {
            "name": self.name,
            "pattern": self.pattern,
            "ratio": self.ratio,
            "reference": self.reference,
            "median_s": median(self.seconds),
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "reference_median_s": median(self.reference_seconds),
            "reference_min_s": min(self.reference_seconds),
            "reference_max_s": max(self.reference_seconds),
            **self.more,
        }


def in_turns(tasks: Mapping[str, Task], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every task in every round; each runs once before, uncounted.

    Args:
        tasks: What to time, by name.
        rounds: How often.
        device: Where the tasks work; a GPU is waited for.
    """
    for task in tasks.values():
        task()
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            _wait(device)
            started = perf_counter()
            task()
            _wait(device)
            times[name].append(perf_counter() - started)
    return times


def most_allocated(task: Task, device: torch.device) -> int:
    """The most bytes of tensors that a task holds at once, beyond what was there before."""
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        task()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        task()
    now = most = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
