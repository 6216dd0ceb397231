"""`benchmark linear`: products with packed 2:4 weights against dense ones, by shape and number of rows."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from roi_lightning.cli.benchmark.kind import Kind, Row, Table, numbers
from roi_lightning.errors import UserError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from roi_lightning.benchmark.models import Shape
    from roi_lightning.benchmark.timing import Ratio

_PACKED: Final = "linear.packed_over_dense"
_NOTE: Final = (
    "×: dense time ÷ packed time; GB/s: of the weights' bytes, beside those of reading a large buffer meanwhile; "
    "min µs: the packed bytes at that rate; other columns: times the speed of dense, by kernel; "
    "÷ best: the automatic choice's time ÷ the fastest kernel's."
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lm", metavar="LM", help="shapes of this model's layers; only its configuration is read")
    add("--shapes", metavar="OUTxIN", help="shapes, separated by commas: 3584x3584,18944x3584")
    add(
        "--rows",
        default="1,2,4,8,16,32,64,128,256,512",
        help="of activations, separated by commas (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="bfloat16",
        help="of weights and activations (default: %(default)s)",
    )
    add("--large_batches", action="store_true", help="with the second packing for large batches, on GPUs")


def _measure(args: argparse.Namespace, device: "torch.device") -> Iterable["Ratio"]:
    import torch

    from roi_lightning.benchmark import LinearBenchmark

    rows, dtype = numbers("--rows", args.rows, "1,16,256"), getattr(torch, args.dtype)
    return LinearBenchmark(_shapes(args), rows, dtype, args.rounds, args.large_batches).run(device)


def _shapes(args: argparse.Namespace) -> "Mapping[Shape, int]":
    from roi_lightning.benchmark.models import model_shapes, parse_shapes
    from roi_lightning.models.source import resolve_model

    if bool(args.lm) == bool(args.shapes):
        raise UserError("benchmark linear: give either --lm LM or --shapes OUTxIN")
    return model_shapes(resolve_model(args.lm)) if args.lm else parse_shapes(args.shapes)


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    packed = [row for row in rows if row["name"] == _PACKED]
    kernels = list(dict.fromkeys(_kernel(row) for row in rows if row["name"] != _PACKED))
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


def _figure(rows: Sequence[Row], title: str) -> "Figure":
    from roi_lightning.plots.chart import speedup_figure

    return speedup_figure([row for row in rows if row["name"] == _PACKED], title)


KIND: Final = Kind(
    "products with packed 2:4 weights against dense ones, by shape and rows",
    10,
    _add_options,
    _measure,
    _table,
    _figure,
)
