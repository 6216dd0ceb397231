"""`benchmark sampler | step`: what masks cost, each figure beside its reference from the same run."""

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from roi_lightning.errors import UserError

if TYPE_CHECKING:
    import torch

    from roi_lightning.bench.timing import Figure


_LABELS: Final = {
    "": "RoI",
    "eager": "eager",
    "autograd": "autograd",
    "maskllm": "MaskLLM",
    "maskllm_published": "published",
}
_NOTES: Final = {
    "sampler": "÷: times one torch.exp (on a GPU torch.add) over as many fp32 numbers; bytes: a weight, at once; "
    "saved: for the backward pass.",
    "step": "GiB: at once, beyond what is held; held: what is learned, its gradient and AdamW's states.",
}
_RIVALS_NOTES: Final = {
    "sampler": "eager: plain torch; autograd: RoI without a backward pass of its own; published: MaskLLM as its "
    "authors wrote it.",
    "step": "roi autograd: without a backward pass of its own; maskllm published: as its authors wrote it.",
}


def build_parser() -> argparse.ArgumentParser:
    """The options of `benchmark`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning benchmark",
        description="Time and memory of drawing masks, alone or within a training step.",
    )
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    sampler = kinds.add_parser(
        "sampler", help="time and memory per weight, against one simple pass over memory"
    )
    sampler.add_argument("--patterns", default="2:4", help="N:M, several with commas (default: %(default)s)")
    sampler.add_argument(
        "--weights", default="16777216", help="in a layer, several with commas (default: %(default)s)"
    )
    step = kinds.add_parser("step", help="a forward and backward pass, against dense training and MaskLLM")
    step.add_argument(
        "--lm", default="smollm2-135m", help="hub id, directory, or GGUF (default: %(default)s)"
    )
    step.add_argument("--random", action="store_true", help="random weights: only the configuration is read")
    step.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the frozen weights (default: as stored; bfloat16 for GGUF and random ones)",
    )
    step.add_argument("--pattern", default="2:4", help="N:M (default: %(default)s)")
    step.add_argument("--batch_size", type=int, default=2, help="windows (default: %(default)s)")
    step.add_argument("--seq_len", type=int, default=1024, help="tokens of each (default: %(default)s)")
    step.add_argument("--checkpointing", action="store_true", help="compute activations again")
    for kind in (sampler, step):
        kind.add_argument("--rivals", action="store_true", help="also the forms one would write first")
        kind.add_argument(
            "--rounds", type=int, default=10, help="medians are over these (default: %(default)s)"
        )
        kind.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
        kind.add_argument("--json", metavar="OUT", type=Path, help="also write the rows as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure and print.

    Returns:
        The exit status.

    Raises:
        UserError: For a device or model that is not there, or a number that makes no sense.
    """
    args = build_parser().parse_args(argv)
    _check(args)
    from roi_lightning.atomic import check_writable, written_aside

    if args.json:
        check_writable(args.json)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its profiler tells of every start and stop
    from roi_lightning.devices import choose_device

    device = choose_device(args.device)
    figures = list({"sampler": _sampler, "step": _step}[args.what](args, device))
    _show(figures, args, device)
    if args.json:
        content = {"device": _name(device), "rows": [figure.to_json() for figure in figures]}
        with written_aside(args.json) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> None:
    least = {"rounds": 1, "batch_size": 1, "seq_len": 2}
    for name, smallest in least.items():
        value = getattr(args, name, smallest)
        if value < smallest:
            raise UserError(f"--{name} {value}: it must be at least {smallest}")


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(float(part)) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"--weights {text!r}: give numbers of weights, like 1e6,16777216")
    return numbers


def _sampler(args: argparse.Namespace, device: "torch.device") -> Iterable["Figure"]:
    from roi_lightning.bench.sampler import Job, sampler_figures
    from roi_lightning.pattern import NMPattern

    patterns = [NMPattern(text) for text in args.patterns.split(",")]
    for weights in _numbers(args.weights):
        yield from sampler_figures(Job(weights, patterns, args.rounds, args.rivals), device)


def _step(args: argparse.Namespace, device: "torch.device") -> Iterable["Figure"]:
    from roi_lightning.bench.step import Job, step_figures
    from roi_lightning.pattern import NMPattern

    job = Job(
        _language_model(args, device),
        NMPattern(args.pattern),
        args.batch_size,
        args.seq_len,
        args.rounds,
        args.rivals,
    )
    return step_figures(job, device)


def _language_model(args: argparse.Namespace, device: "torch.device") -> Any:
    from roi_lightning.language_model import enable_checkpointing, load_language_model, random_language_model
    from roi_lightning.sources import resolve_model

    source = resolve_model(args.lm)
    if args.random:
        lm = random_language_model(source, device, args.dtype)
    else:
        lm = load_language_model(source, args.dtype)
        lm.to(device)  # type: ignore[arg-type]
    if args.checkpointing:
        enable_checkpointing(lm)
    return lm


def _name(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _show(figures: Sequence["Figure"], args: argparse.Namespace, device: "torch.device") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{_name(device)}; medians of {args.rounds} rounds")
    rows = [figure.to_json() for figure in figures]
    heads, cells = {"sampler": _sampler_cells, "step": _step_cells}[args.what](rows)
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left")
    for row in cells:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(
        " ".join([_NOTES[args.what], *([_RIVALS_NOTES[args.what]] if args.rivals else [])]), highlight=False
    )


_Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _sampler_cells(rows: Sequence[dict[str, Any]]) -> _Table:
    reference = str(rows[0]["reference"]).removeprefix("torch.")
    heads = "sampler", "N:M", "size", "way", "ms", "spread", f"÷ {reference}", "bytes", "saved"
    return heads, [
        (
            _LABELS[kind],
            row["pattern"],
            f"{row['weights'] / 1e6:.1f}M",
            "fwd" if way == "forward" else "bwd",
            *_times(row),
            f"{row['ratio']:,.2f}",
            f"{row['temporary_bytes_per_weight']:,.1f}",
            f"{row['saved_bytes_per_weight']:,.1f}",
        )
        for row in rows
        for way, _, kind in [row["name"].removeprefix("sampler.").partition("_")]
    ]


def _step_cells(rows: Sequence[dict[str, Any]]) -> _Table:
    heads = "a step of", "ms", "spread", "RoI's time ÷", "GiB", "and held"
    ours = rows[0]
    first = "roi", *_times(ours), "", *_memory(ours["bytes"], ours["held_bytes"])
    return heads, [
        first,
        *(
            (
                row["reference"].replace("_", " "),
                *_times(row, "reference_"),
                f"{row['ratio']:,.2f}",
                *_memory(row["reference_bytes"], row["reference_held_bytes"]),
            )
            for row in rows
        ),
    ]


def _times(row: dict[str, Any], whose: str = "") -> tuple[str, str]:
    middle, least, most = (row[f"{whose}{kind}_s"] for kind in ("median", "min", "max"))
    return f"{1e3 * middle:,.1f}", f"{(most - least) / middle:.0%}"


def _memory(temporary: int, held: int) -> tuple[str, str]:
    return f"{temporary / 2**30:,.2f}", f"{held / 2**30:,.2f}"
