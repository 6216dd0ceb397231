"""`benchmark linear`: products with packed 2:4 weights against dense ones, by shape and number of rows."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from roi_lightning.commands.benchmark.kind import Kind, Row, Table
from roi_lightning.commands.benchmark.numbers import numbers
from roi_lightning.errors import UserError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure as Picture

    from roi_lightning.bench.shapes import Shape
    from roi_lightning.bench.timing import Figure

_PACKED: Final = "linear.packed_over_dense"
_NOTE: Final = (
    "×: dense time ÷ packed time; GB/s: of the weights' bytes, beside those of reading a large buffer meanwhile; "
    "least µs: the packed bytes at that rate; other columns: times the speed of dense, by the way they name; "
    "÷ best: the automatic choice's time ÷ the best way's."
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lm", metavar="MODEL", help="shapes of this model's layers; only its configuration is read")
    add("--shapes", metavar="OUTxIN", help="shapes, several with commas: 3584x3584,18944x3584")
    add(
        "--rows",
        default="1,2,4,8,16,32,64,128,256,512",
        help="of activations, several with commas (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="bfloat16",
        help="of weights and activations (default: %(default)s)",
    )
    add("--large_batches", action="store_true", help="with the second packing for many rows, on GPUs")


def _measure(args: argparse.Namespace, device: "torch.device") -> Iterable["Figure"]:
    import torch

    from roi_lightning.bench.linear import Job, linear_figures

    rows = numbers("--rows", args.rows, "1,16,256")
    job = Job(_shapes(args), rows, getattr(torch, args.dtype), args.rounds, args.large_batches)
    return linear_figures(job, device)


def _shapes(args: argparse.Namespace) -> "Mapping[Shape, int]":
    from roi_lightning.bench.shapes import model_shapes, parse_shapes
    from roi_lightning.sources import resolve_model

    if bool(args.lm) == bool(args.shapes):
        raise UserError("benchmark linear: give either --lm MODEL or --shapes OUTxIN")
    return model_shapes(resolve_model(args.lm)) if args.lm else parse_shapes(args.shapes)


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    ways = list(dict.fromkeys(_way(row) for row in rows if row["name"] != _PACKED))
    cells = [_cells(of_packed, others, ways) for of_packed, others in _grouped(rows)]
    heads = (
        "weights",
        "rows",
        "dense µs",
        "packed µs",
        "×",
        "least µs",
        "dense GB/s",
        "packed GB/s",
        "memory GB/s",
    )
    return Table([*heads, *ways, "best", "÷ best"], cells, f"{_NOTE} {_stretches(rows)}")


def _grouped(rows: Sequence[Row]) -> list[tuple[Row, dict[str, float]]]:
    """The automatic choice's row of every measurement, and the other ways' speeds."""
    groups: list[tuple[Row, dict[str, float]]] = []
    for of_packed in (row for row in rows if row["name"] == _PACKED):
        same = [row for row in rows if all(row[key] == of_packed[key] for key in ("shape", "rows"))]
        groups.append((of_packed, {_way(row): row["ratio"] for row in same if row is not of_packed}))
    return groups


def _cells(row: Row, others: Mapping[str, float], ways: Sequence[str]) -> tuple[str, ...]:
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
        *(f"{others[way]:,.2f}" if way in others else "" for way in ways),
        row["best"],
        f"{row['over_best']:,.2f}",
    )


def _way(row: Row) -> str:
    return str(row["name"].removeprefix("linear.").removesuffix("_over_dense"))


def _stretches(rows: Sequence[Row]) -> str:
    """For which rows packed weights are quicker, by shape."""
    from roi_lightning.bench.crossover import quicker

    packed = [row for row in rows if row["name"] == _PACKED]
    texts = []
    for shape in dict.fromkeys(row["shape"] for row in packed):
        found = quicker({row["rows"]: row["ratio"] for row in packed if row["shape"] == shape})
        spans = " and ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in found)
        texts.append(f"{shape}: {f'quicker at {spans} rows' if found else 'never quicker'}")
    return f"Packed against dense, {'; '.join(texts)}."


def _picture(rows: Sequence[Row], title: str) -> "Picture":
    from roi_lightning.figures.speed import speedup_figure

    return speedup_figure([row for row in rows if row["name"] == _PACKED], title)


KIND: Final = Kind(
    "products with packed 2:4 weights against dense ones, by shape and rows",
    10,
    _add_options,
    _measure,
    _table,
    _picture,
)
