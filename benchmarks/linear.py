"""Products with 2:4 weights on a CPU, packed against dense, for every shape and number of rows.

python -m benchmarks.linear --lm smollm2-135m --rows 1,16,256 --json F.json --figure F.png
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, groupby
from statistics import median
from typing import Any, Final

import torch
from matplotlib.figure import Figure

from benchmarks.speed.chart import speedup_figure
from benchmarks.speed.models import Shape, model_shapes, parse_shapes
from benchmarks.speed.products import DENSE, PACKED, ColdCacheLoop, Weights
from benchmarks.speed.script import Row, Script, Table, numbers
from benchmarks.speed.timing import BufferRead, Speedup, cold_bytes, results_in_turns, seconds
from roi_lightning.contrib.packed.format import PATTERN
from roi_lightning.errors import UserError
from roi_lightning.models.source import resolve_model

_READ: Final = "read"
_AUTOMATIC: Final = "linear.packed_over_dense"
_NOTE: Final = (
    "×: dense time ÷ packed time; GB/s: of the weights' bytes, beside those of reading a large buffer meanwhile; "
    "min µs: the packed bytes at that rate; other columns: times the speed of dense, by kernel; "
    "÷ best: the automatic choice's time ÷ the fastest kernel's."
)


@dataclass(frozen=True)
class LinearBenchmark:
    """What to measure.

    Attributes:
        shapes: (out, in), and how many layers have it.
        rows: Of activations, each.
        dtype: Of weights and activations.
        rounds: How often.
    """

    shapes: Mapping[Shape, int]
    rows: Sequence[int]
    dtype: torch.dtype
    rounds: int

    def run(self) -> Iterator[Speedup]:
        """Every backend against `F.linear` on the same weights with their zeros.

        Where several layers share a shape, as in a model, the last rows are of all layers together.
        """
        found: list[LinearTimes] = []
        for times in self._measure():
            found.append(times)
            yield from times.speedups(self.dtype)
        if sum(self.shapes.values()) > len(self.shapes):
            for rows in self.rows:
                yield from together([times for times in found if times.rows == rows]).speedups(self.dtype)

    def _measure(self) -> Iterator["LinearTimes"]:
        read = BufferRead()
        for shape, count in self.shapes.items():
            weights = Weights(shape, self.dtype, cold_bytes())
            for rows in self.rows:
                x = torch.randn(rows, shape[1], dtype=self.dtype)
                turn = cycle(range(weights.copies))
                loops = {name: ColdCacheLoop(each, x, turn) for name, each in weights.products(x).items()}
                tasks = {name: partial(_seconds_after, read, loop) for name, loop in loops.items()}
                timed = {**tasks, _READ: partial(seconds, read)}
                times = results_in_turns(timed, self.rounds, f"{shape[0]}x{shape[1]} weights, {rows} rows")
                bandwidth = read.nbytes / median(times.pop(_READ))
                of_one = {name: [s / loops[name].steps for s in found] for name, found in times.items()}
                yield LinearTimes(f"{shape[0]}x{shape[1]}", count, rows, of_one, weights.nbytes, bandwidth)


def _seconds_after(read: BufferRead, loop: ColdCacheLoop) -> float:
    """Time a loop with the caches as the read leaves them, whatever ran before that."""
    read()
    return seconds(loop)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    add = parser.add_argument
    add("--lm", metavar="LM", help="shapes of this model's layers; only its configuration is read")
    add("--shapes", metavar="OUTxIN", help="shapes, separated by commas: 3584x3584,18944x3584")
    add(
        "--rows",
        type=numbers,
        default="1,2,4,8,16,32,64,128,256,512",
        help="of activations, separated by commas (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="bfloat16",
        help="of weights and activations (default: %(default)s)",
    )

    Script(parser, _measure, _table, figure=_figure).run(argv)


def _measure(args: argparse.Namespace) -> Iterator[Speedup]:
    dtype = getattr(torch, args.dtype)
    return LinearBenchmark(_shapes(args), args.rows, dtype, args.rounds).run()


def _shapes(args: argparse.Namespace) -> Mapping[Shape, int]:
    if bool(args.lm) == bool(args.shapes):
        raise UserError("give either --lm LM or --shapes OUTxIN")
    return model_shapes(resolve_model(args.lm)) if args.lm else parse_shapes(args.shapes)


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    packed = [row for row in rows if row["name"] == _AUTOMATIC]
    kernels = list(dict.fromkeys(_kernel(row) for row in rows if row["name"] != _AUTOMATIC))
    head = [
        *("weights", "rows", "dense µs", "packed µs", "×", "min µs", "dense GB/s", "packed GB/s"),
        *("memory GB/s", *kernels, "best", "÷ best"),
    ]
    speeds = {(row["shape"], row["rows"], _kernel(row)): row["ratio"] for row in rows}
    cells = [
        _cells(row, [speeds.get((row["shape"], row["rows"], kernel)) for kernel in kernels]) for row in packed
    ]
    return Table(head, cells, f"{_NOTE} {_summary(packed)}")


def _cells(row: Row, speeds: Iterable[float | None]) -> tuple[str, ...]:
    rate = row["bandwidth_bytes_per_s"]
    return (
        f"{row['layers']} × {row['shape']}",
        f"{row['rows']}",
        f"{1e6 * row['reference_median_s']:,.1f}",
        f"{1e6 * row['median_s']:,.1f}",
        f"{row['ratio']:,.2f}",
        f"{1e6 * row['bytes'] / rate:,.1f}",
        f"{row['reference_bytes'] / row['reference_median_s'] / 1e9:,.1f}",
        f"{row['bytes'] / row['median_s'] / 1e9:,.1f}",
        f"{rate / 1e9:,.1f}",
        *("" if speed is None else f"{speed:,.2f}" for speed in speeds),
        row["best"],
        f"{row['over_best']:,.2f}",
    )


def _kernel(row: Row) -> str:
    return str(row["name"].removeprefix("linear.").removesuffix("_over_dense"))


def _summary(packed: Sequence[Row]) -> str:
    """For how many rows packed weights are faster, by shape."""
    texts = []
    for shape in dict.fromkeys(row["shape"] for row in packed):
        found = faster_rows({row["rows"]: row["ratio"] for row in packed if row["shape"] == shape})
        spans = " and ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in found)
        texts.append(f"{shape}: {f'faster at {spans} rows' if found else 'never faster'}")
    return f"Packed against dense, {'; '.join(texts)}."


def faster_rows(ratios: Mapping[int, float]) -> list[tuple[int, int]]:
    """First and last of every stretch of measured rows in which all ratios are above 1.

    Args:
        ratios: Speed ÷ the reference's speed, by rows.
    """
    groups = groupby(sorted(ratios.items()), key=lambda item: item[1] > 1)
    stretches = ([rows for rows, _ in group] for is_faster, group in groups if is_faster)
    return [(rows[0], rows[-1]) for rows in stretches]


def _figure(rows: Sequence[Row], machine: str) -> Figure:
    return speedup_figure([row for row in rows if row["name"] == _AUTOMATIC], machine)


if __name__ == "__main__":
    main()
