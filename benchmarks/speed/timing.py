"""Time and memory of alternatives, taken in turns so that a busy moment hits all of them."""

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from typing_extensions import override

# Enough for caches that the operating system doesn't report.
_MIN_BYTES: Final = 256 << 20
_TIMES_THE_CACHE: Final = 4
_CPU: Final = torch.device("cpu")

Task = Callable[[], object]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Ratio:
    """One alternative against its reference.

    Attributes:
        name: As in the table and the JSON.
        pattern: N:M, empty where it plays no part.
        seconds: One per round.
        reference: The reference's name.
        reference_seconds: One per round.
        more: Other metrics, by name.
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
class Speedup(Ratio):
    """A ratio of speeds: above 1 is faster than the reference."""

    @property
    @override
    def ratio(self) -> float:
        """The reference's median ÷ median."""
        return median(self.reference_seconds) / median(self.seconds)


def in_turns(
    tasks: Mapping[str, Task], rounds: int, device: torch.device, description: str
) -> dict[str, list[float]]:
    """Seconds of every task in every round; each runs once before, uncounted.

    Args:
        tasks: What to time, by name.
        rounds: How often.
        device: Where the tasks run; a GPU is waited for.
        description: For the progress report.
    """
    timed = {name: partial(seconds, task, device) for name, task in tasks.items()}
    return results_in_turns(timed, rounds, description)


def results_in_turns(
    tasks: Mapping[str, Callable[[], _Result]], rounds: int, description: str
) -> dict[str, list[_Result]]:
    """What every task returns in every round; each runs once before, and what it returns then is dropped."""
    results: dict[str, list[_Result]] = {name: [] for name in tasks}
    for count in range(rounds + 1):
        sys.stderr.write(
            f"{description}: round {count} of {rounds}\n"
        )  # no bar, whose thread would be timed too
        for name, task in tasks.items():
            result = task()
            if count:
                results[name].append(result)
    return results


def seconds(task: Task, device: torch.device = _CPU) -> float:
    """How long a task takes; a GPU is waited for before and after."""
    _wait(device)
    started = perf_counter()
    task()
    _wait(device)
    return perf_counter() - started


def peak_bytes(task: Task, device: torch.device) -> int:
    """Peak memory of a task: bytes of tensors that it holds at once, beyond what was there before."""
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        task()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # or what an earlier task left may be freed, and subtracted, in the middle of this one
    # Not torch.profiler, which makes Python objects of all events.
    with profile(profile_memory=True) as recorded:
        task()
    now = peak = 0
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cold_bytes() -> int:
    """How many bytes to loop over on a CPU, so that none is in a cache when its turn comes again."""
    name = "SC_LEVEL3_CACHE_SIZE"
    last_cache = max(0, os.sysconf(name)) if name in os.sysconf_names else 0
    return max(_MIN_BYTES, _TIMES_THE_CACHE * last_cache)


class BufferRead:
    """A task that reads a buffer far larger than the caches, once: what memory bandwidth allows.

    Attributes:
        nbytes: What it reads.
    """

    def __init__(self) -> None:
        self._buffer = torch.ones(cold_bytes() // 4)
        self.nbytes = self._buffer.nbytes

    def __call__(self) -> Tensor:
        """Read it all."""
        return self._buffer.sum()


def weight_bytes(lm: nn.Module) -> int:
    """Bytes of the weights and buffers that every decoding step reads completely, each storage once.

    Embeddings are left out, of which a step reads a row for each token, unless the head shares their weight. Experts
    count all.
    """
    read: dict[tuple[int, int], int] = {}
    for module in lm.modules():
        if not isinstance(module, nn.Embedding):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
                read[start] = tensor.nbytes
    return sum(read.values())


def mean_cache_bytes(at_the_end: int, prompt: int, tokens: int) -> float:
    """Bytes of keys and values that a decoding step reads, on average over the steps.

    Args:
        at_the_end: Bytes for all tokens but the last, which no step reads.
        prompt: Tokens before the first new one.
        tokens: New ones; the first comes from the prompt, and each other from a step.
    """
    return at_the_end * (prompt + tokens / 2) / (prompt + tokens - 1)
