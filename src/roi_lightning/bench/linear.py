"""Products with 2:4 weights, packed against dense, for every shape and number of rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any, Final

import torch

from roi_lightning.bench.crossover import best_way
from roi_lightning.bench.memory import Reading, cold_bytes
from roi_lightning.bench.shapes import Shape
from roi_lightning.bench.timing import Speedup, results_in_turns, seconds
from roi_lightning.bench.walk import Walk
from roi_lightning.bench.ways import DENSE, NOT_ALONE, PACKED, Weights
from roi_lightning.runtime.packing import PATTERN

_READ: Final = "read"


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        shapes: (out, in), and how many layers have it.
        rows: Of activations, each.
        dtype: Of weights and activations.
        rounds: How often.
        large_batches: Also with the second packing for many rows.
    """

    shapes: Mapping[Shape, int]
    rows: Sequence[int]
    dtype: torch.dtype
    rounds: int
    large_batches: bool


@dataclass(frozen=True)
class Measured:
    """Products with so many rows.

    Attributes:
        shape: `OUTxIN`, or `all` for the layers of a model together.
        count: How many layers.
        rows: Of activations.
        seconds: Of one product with each of the layers, one per round, by way.
        nbytes: Of the weights of the layers, dense and packed.
        bandwidth: Bytes a second that memory gave meanwhile.
    """

    shape: str
    count: int
    rows: int
    seconds: Mapping[str, list[float]]
    nbytes: Mapping[str, int]
    bandwidth: float


def linear_figures(job: Job, device: torch.device) -> Iterator[Speedup]:
    """Every way against `F.linear` on the same weights with their zeros.

    Where several layers share a shape, as in a model, the last figures are of all layers together.
    """
    found: list[Measured] = []
    for measured in _measure(job, device):
        found.append(measured)
        yield from _figures(measured, job.dtype)
    if sum(job.shapes.values()) > len(job.shapes):
        for rows in job.rows:
            yield from _figures(together([one for one in found if one.rows == rows]), job.dtype)


def _measure(job: Job, device: torch.device) -> Iterator[Measured]:
    reading = Reading(device)
    for shape, count in job.shapes.items():
        weights = Weights(shape, job.dtype, device, cold_bytes(device), job.large_batches)
        for rows in job.rows:
            x = torch.randn(rows, shape[1], dtype=job.dtype, device=device)
            turn = cycle(range(weights.copies))
            walks = {way: Walk(products, x, turn) for way, products in weights.ways(x).items()}
            tasks = {way: partial(_seconds_after, reading, walk, device) for way, walk in walks.items()}
            times = results_in_turns({**tasks, _READ: partial(seconds, reading, device)}, job.rounds)
            bandwidth = reading.nbytes / median(times.pop(_READ))
            of_one = {way: [s / walks[way].steps for s in found] for way, found in times.items()}
            yield Measured(f"{shape[0]}x{shape[1]}", count, rows, of_one, weights.nbytes, bandwidth)


def _seconds_after(reading: Reading, walk: Walk, device: torch.device) -> float:
    """Time a walk with caches as the reading leaves them, whatever ran before that."""
    reading()
    return seconds(walk, device)


def together(measured: Sequence[Measured]) -> Measured:
    """All layers of a model, from one measurement of each of their shapes with equally many rows.

    Ways that some shape can't go are left out.
    """
    first, *others = measured
    summed = {
        way: [
            sum(one.count * s for one, s in zip(measured, round_, strict=True))
            for round_ in zip(*(one.seconds[way] for one in measured), strict=True)
        ]
        for way in first.seconds
        if all(way in other.seconds for other in others)
    }
    nbytes = {form: sum(one.count * one.nbytes[form] for one in measured) for form in first.nbytes}
    count, bandwidth = sum(one.count for one in measured), median(one.bandwidth for one in measured)
    return Measured("all", count, first.rows, summed, nbytes, bandwidth)


def _figures(measured: Measured, dtype: torch.dtype) -> Iterator[Speedup]:
    reference = measured.seconds[DENSE]
    facts: dict[str, Any] = {
        "shape": measured.shape,
        "layers": measured.count,
        "rows": measured.rows,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": measured.nbytes[PACKED],
        "reference_bytes": measured.nbytes[DENSE],
        "bandwidth_bytes_per_s": measured.bandwidth,
    }
    for way, found in measured.seconds.items():
        if way != DENSE:
            more = facts | (_choice(measured) if way == PACKED else {})
            yield Speedup(f"linear.{way}_over_dense", str(PATTERN), found, DENSE, reference, more)


def _choice(measured: Measured) -> dict[str, Any]:
    alone = {way: median(found) for way, found in measured.seconds.items() if way not in NOT_ALONE}
    best, over = best_way(alone, median(measured.seconds[PACKED]))
    return {"best": best, "over_best": over}
