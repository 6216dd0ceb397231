"""`benchmark sampler | step | linear | decode`: each metric beside its reference from the same run."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from roi_lightning.cli.benchmark import decode, linear, sampler, step
from roi_lightning.cli.options import PROGRAM, LineParser
from roi_lightning.errors import UserError

if TYPE_CHECKING:
    import torch

_KINDS: Final = {"sampler": sampler.KIND, "step": step.KIND, "linear": linear.KIND, "decode": decode.KIND}
_MIN: Final = {"rounds": 1, "batch_size": 1, "seq_len": 2, "prompt": 1, "tokens": 2}


def build_parser() -> argparse.ArgumentParser:
    """The options of `benchmark`."""
    parser = LineParser(
        prog=f"{PROGRAM} benchmark",
        description="Time and memory of drawing masks, alone or within a training step, and of running 2:4 models.",
    )
    add_kinds(parser)
    return parser


def add_kinds(parser: argparse.ArgumentParser) -> None:
    """Give a parser a command for each kind."""
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, kind in _KINDS.items():
        own = kinds.add_parser(name, help=kind.help)
        kind.add_options(own)
        add = own.add_argument
        add("--rounds", type=int, default=kind.rounds, help="medians are over these (default: %(default)s)")
        add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
        add("--json", metavar="OUT", type=Path, help="also write the rows as JSON")
        if kind.figure:
            add("--figure", metavar="OUT", type=Path, help="also draw them, as PNG")


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what was asked for.

    Returns:
        The exit status.

    Raises:
        UserError: For a device or model that does not exist, or a number out of range.
    """
    args = build_parser().parse_args(argv)
    kind, figure = _KINDS[args.what], getattr(args, "figure", None)
    _check(args)
    from roi_lightning.utils.atomic_io import check_writable, write_json, written_aside
    from roi_lightning.utils.tables import print_table, standard_output

    for out in filter(None, (args.json, figure)):
        check_writable(out)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler reports every start and stop
    from roi_lightning.utils.devices import choose_device

    device = choose_device(args.device)
    rows = [measured.to_json() for measured in kind.measure(args, device)]
    title, table = f"{_name(device)}; medians of {args.rounds} rounds", kind.table(rows, args)
    print_table(table.head, table.rows, title)
    standard_output().print(table.note, highlight=False)
    if args.json:
        write_json(args.json, {"device": _name(device), "rows": rows})
    if kind.figure and figure:
        from roi_lightning.plots import to_png

        with written_aside(figure) as partial:
            partial.write_bytes(to_png(kind.figure(rows, title)))
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, minimum in _MIN.items():
        value = getattr(args, name, minimum)
        if value < minimum:
            raise UserError(f"--{name} {value}: it must be at least {minimum}")


def _name(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
