"""Time and memory of alternatives, taken in turns so that a busy moment hits all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

Task = Callable[[], object]
_Result = TypeVar("_Result")


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


@dataclass(frozen=True)
class Speedup(Figure):
    """A figure whose ratio is one of speeds: above 1 is faster than the reference."""

    @property
    @override
    def ratio(self) -> float:
        """The reference's median ÷ median."""
        return median(self.reference_seconds) / median(self.seconds)


def in_turns(tasks: Mapping[str, Task], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every task in every round; each runs once before, uncounted.

    Args:
        tasks: What to time, by name.
        rounds: How often.
        device: Where the tasks work; a GPU is waited for.
    """
    return results_in_turns({name: partial(seconds, task, device) for name, task in tasks.items()}, rounds)


def results_in_turns(tasks: Mapping[str, Callable[[], _Result]], rounds: int) -> dict[str, list[_Result]]:
    """What every task returns in every round; each runs once before, and what it returns then is dropped."""
    for task in tasks.values():
        task()
    results: dict[str, list[_Result]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            results[name].append(task())
    return results


def seconds(task: Task, device: torch.device) -> float:
    """How long a task takes; a GPU is waited for before and after."""
    _wait(device)
    started = perf_counter()
    task()
    _wait(device)
    return perf_counter() - started


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
