"""`benchmark sampler`: time and memory of drawing masks, per weight."""

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from roi_lightning.cli.benchmark.kind import Kind, Row, Table, numbers, times

if TYPE_CHECKING:
    import torch

    from roi_lightning.benchmark.timing import Ratio

_LABELS: Final = {
    "": "RoI",
    "eager": "eager",
    "autograd": "autograd",
    "maskllm": "MaskLLM",
    "maskllm_published": "published",
}
_NOTE: Final = (
    "÷: times one torch.exp (on a GPU torch.add) over as many fp32 values; bytes: peak, per weight; "
    "saved: for the backward pass."
)
_BASELINES_NOTE: Final = (
    "eager: plain torch; autograd: RoI without a backward pass of its own; "
    "published: MaskLLM as its authors wrote it."
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pattern", default="2:4", help="N:M, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--weights", default="16777216", help="in a layer, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--baselines", action="store_true", help="also straightforward implementations")


def _measure(args: argparse.Namespace, device: "torch.device") -> Iterable["Ratio"]:
    from roi_lightning.benchmark import SamplerBenchmark
    from roi_lightning.masks.pattern import NMPattern

    patterns = [NMPattern(text) for text in args.pattern.split(",")]
    for weights in numbers("--weights", args.weights, "1e6,16777216"):
        yield from SamplerBenchmark(weights, patterns, args.rounds, args.baselines).run(device)


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    reference = str(rows[0]["reference"]).removeprefix("torch.")
    head = "sampler", "N:M", "size", "pass", "ms", "spread", f"÷ {reference}", "bytes", "saved"
    cells = [
        (
            _LABELS[kind],
            row["pattern"],
            f"{row['weights'] / 1e6:.1f}M",
            "fwd" if name == "forward" else "bwd",
            *times(row),
            f"{row['ratio']:,.2f}",
            f"{row['temporary_bytes_per_weight']:,.1f}",
            f"{row['saved_bytes_per_weight']:,.1f}",
        )
        for row in rows
        for name, _, kind in [row["name"].removeprefix("sampler.").partition("_")]
    ]
    return Table(head, cells, f"{_NOTE} {_BASELINES_NOTE}" if args.baselines else _NOTE)


KIND: Final = Kind(
    "time and memory per weight, against one simple pass over memory", 10, _add_options, _measure, _table
)
