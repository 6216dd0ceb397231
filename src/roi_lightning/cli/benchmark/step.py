"""`benchmark step`: time and memory of a forward and backward pass with masks drawn."""

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from roi_lightning.cli.benchmark.kind import Kind, Row, Table, times

if TYPE_CHECKING:
    import torch

    from roi_lightning.benchmark.timing import Ratio

_NOTE: Final = "GiB: peak, beyond what is held; held: what is learned, its gradient and AdamW's states."
_BASELINES_NOTE: Final = (
    "roi autograd: without a backward pass of its own; maskllm published: as its authors wrote it."
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lm", default="smollm2-135m", help="hub id, directory, or GGUF (default: %(default)s)")
    add("--random", action="store_true", help="random weights: only the configuration is read")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the frozen weights (default: as stored; bfloat16 for GGUF and random ones)",
    )
    add("--pattern", default="2:4", help="N:M (default: %(default)s)")
    add("--batch_size", type=int, default=2, help="windows (default: %(default)s)")
    add("--seq_len", type=int, default=1024, help="tokens of each (default: %(default)s)")
    add("--activation_checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--baselines", action="store_true", help="also straightforward implementations")


def _measure(args: argparse.Namespace, device: "torch.device") -> Iterable["Ratio"]:
    from roi_lightning.benchmark import StepBenchmark
    from roi_lightning.masks.pattern import NMPattern

    lm, pattern = _language_model(args, device), NMPattern(args.pattern)
    return StepBenchmark(lm, pattern, args.batch_size, args.seq_len, args.rounds, args.baselines).run(device)


def _language_model(args: argparse.Namespace, device: "torch.device") -> Any:
    from roi_lightning.models.freezing import enable_checkpointing, random_language_model
    from roi_lightning.models.loading import load_language_model
    from roi_lightning.models.source import resolve_model

    source = resolve_model(args.lm)
    if args.random:
        lm = random_language_model(source, device, args.dtype)
    else:
        lm = load_language_model(source, args.dtype, device=device)
        lm.to(device)  # type: ignore[arg-type]
    if args.activation_checkpointing:
        enable_checkpointing(lm)
    return lm


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    head = "a step of", "ms", "spread", "RoI's time ÷", "GiB", "and held"
    first = "roi", *times(rows[0]), "", *_memory(rows[0]["bytes"], rows[0]["held_bytes"])
    others = [
        (
            row["reference"].replace("_", " "),
            *times(row, "reference_"),
            f"{row['ratio']:,.2f}",
            *_memory(row["reference_bytes"], row["reference_held_bytes"]),
        )
        for row in rows
    ]
    return Table(head, [first, *others], f"{_NOTE} {_BASELINES_NOTE}" if args.baselines else _NOTE)


def _memory(temporary: int, held: int) -> tuple[str, str]:
    return f"{temporary / 2**30:,.2f}", f"{held / 2**30:,.2f}"


KIND: Final = Kind(
    "a forward and backward pass, against dense training and MaskLLM", 10, _add_options, _measure, _table
)
