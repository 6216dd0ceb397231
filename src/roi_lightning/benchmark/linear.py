"""Products with 2:4 weights, packed against dense, for every shape and number of rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any, Final

import torch

from roi_lightning.benchmark.linear_backends import DENSE, PACKED, ColdCacheLoop, Weights
from roi_lightning.benchmark.models import Shape
from roi_lightning.benchmark.timing import BufferRead, Speedup, cold_bytes, results_in_turns, seconds
from roi_lightning.runtime.packed_format import PATTERN

_READ: Final = "read"


@dataclass(frozen=True)
class LinearBenchmark:
    """What to measure.

    Attributes:
        shapes: (out, in), and how many layers have it.
        rows: Of activations, each.
        dtype: Of weights and activations.
        rounds: How often.
        large_batches: Also with the second packing for large batches.
    """

    shapes: Mapping[Shape, int]
    rows: Sequence[int]
    dtype: torch.dtype
    rounds: int
    large_batches: bool

    def run(self, device: torch.device) -> Iterator[Speedup]:
        """Every backend against `F.linear` on the same weights with their zeros.

        Where several layers share a shape, as in a model, the last rows are of all layers together.
        """
        found: list[LinearTimes] = []
        for times in self._measure(device):
            found.append(times)
            yield from times.speedups(self.dtype)
        if sum(self.shapes.values()) > len(self.shapes):
            for rows in self.rows:
                yield from together([times for times in found if times.rows == rows]).speedups(self.dtype)

    def _measure(self, device: torch.device) -> Iterator["LinearTimes"]:
        read = BufferRead(device)
        for shape, count in self.shapes.items():
            weights = Weights(shape, self.dtype, device, cold_bytes(device), self.large_batches)
            for rows in self.rows:
                x = torch.randn(rows, shape[1], dtype=self.dtype, device=device)
                turn = cycle(range(weights.copies))
                loops = {name: ColdCacheLoop(each, x, turn) for name, each in weights.products(x).items()}
                tasks = {name: partial(_seconds_after, read, loop, device) for name, loop in loops.items()}
                timed = {**tasks, _READ: partial(seconds, read, device)}
                times = results_in_turns(timed, self.rounds, f"{shape[0]}x{shape[1]} weights, {rows} rows")
                bandwidth = read.nbytes / median(times.pop(_READ))
                of_one = {name: [s / loops[name].steps for s in found] for name, found in times.items()}
                yield LinearTimes(f"{shape[0]}x{shape[1]}", count, rows, of_one, weights.nbytes, bandwidth)


def _seconds_after(read: BufferRead, loop: ColdCacheLoop, device: torch.device) -> float:
    """Time a loop with the caches as the read leaves them, whatever ran before that."""
    read()
    return seconds(loop, device)


@dataclass(frozen=True)
class LinearTimes:
    """Products with so many rows.

    Attributes:
        shape: `OUTxIN`, or `all` for the layers of a model together.
        count: How many layers.
        rows: Of activations.
        seconds: Of one product with each of the layers, one per round, by backend.
        nbytes: Of the weights of the layers, dense and packed.
        bandwidth: Memory's bytes per second meanwhile.
    """

    shape: str
    count: int
    rows: int
    seconds: Mapping[str, list[float]]
    nbytes: Mapping[str, int]
    bandwidth: float

    def speedups(self, dtype: torch.dtype) -> Iterator[Speedup]:
        """Every backend against the dense one; the automatic choice also against the fastest kernel."""
        facts: dict[str, Any] = {
            "shape": self.shape,
            "layers": self.count,
            "rows": self.rows,
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": self.nbytes[PACKED],
            "reference_bytes": self.nbytes[DENSE],
            "bandwidth_bytes_per_s": self.bandwidth,
        }
        kernels = {name: median(s) for name, s in self.seconds.items() if name not in (DENSE, PACKED)}
        best = min(kernels, key=lambda name: kernels[name])
        choice = {"best": best, "over_best": median(self.seconds[PACKED]) / kernels[best]}
        for name, found in self.seconds.items():
            if name != DENSE:
                more = facts | (choice if name == PACKED else {})
                reference = self.seconds[DENSE]
                yield Speedup(f"linear.{name}_over_dense", str(PATTERN), found, DENSE, reference, more)


def together(measured: Sequence[LinearTimes]) -> LinearTimes:
    """All layers of a model, from one measurement of each of their shapes with equally many rows.

    Kernels that don't work for some shape are left out.
    """
    first, *others = measured
    summed = {
        name: [
            sum(one.count * s for one, s in zip(measured, round_, strict=True))
            for round_ in zip(*(one.seconds[name] for one in measured), strict=True)
        ]
        for name in first.seconds
        if all(name in other.seconds for other in others)
    }
    nbytes = {form: sum(one.count * one.nbytes[form] for one in measured) for form in first.nbytes}
    count, bandwidth = sum(one.count for one in measured), median(one.bandwidth for one in measured)
    return LinearTimes("all", count, first.rows, summed, nbytes, bandwidth)
