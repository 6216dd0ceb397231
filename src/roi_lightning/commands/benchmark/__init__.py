"""`benchmark sampler | step | linear | decode`: each figure beside its reference from the same run."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from roi_lightning.commands.benchmark import decode, linear, sampler, step
from roi_lightning.commands.benchmark.kind import Table
from roi_lightning.errors import UserError

if TYPE_CHECKING:
    import torch

_KINDS: Final = {"sampler": sampler.KIND, "step": step.KIND, "linear": linear.KIND, "decode": decode.KIND}
_LEAST: Final = {"rounds": 1, "batch_size": 1, "seq_len": 2, "prompt": 1, "tokens": 2}
_PIPED_WIDTH: Final = 160


def build_parser() -> argparse.ArgumentParser:
    """The options of `benchmark`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning benchmark",
        description="Time and memory of drawing masks, alone or within a training step, and of running 2:4 models.",
    )
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, kind in _KINDS.items():
        own = kinds.add_parser(name, help=kind.help)
        kind.add_options(own)
        add = own.add_argument
        add("--rounds", type=int, default=kind.rounds, help="medians are over these (default: %(default)s)")
        add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
        add("--json", metavar="OUT", type=Path, help="also write the rows as JSON")
        if kind.picture:
            add("--figure", metavar="OUT", type=Path, help="also draw them, as PNG")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write what was asked for.

    Returns:
        The exit status.

    Raises:
        UserError: For a device or model that is not there, or a number that makes no sense.
    """
    args = build_parser().parse_args(argv)
    kind, figure = _KINDS[args.what], getattr(args, "figure", None)
    _check(args)
    from roi_lightning.atomic import check_writable

    for out in filter(None, (args.json, figure)):
        check_writable(out)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its profiler tells of every start and stop
    from roi_lightning.devices import choose_device

    device = choose_device(args.device)
    rows = [measured.to_json() for measured in kind.measure(args, device)]
    title = f"{_name(device)}; medians of {args.rounds} rounds"
    _show(kind.table(rows, args), title)
    if args.json:
        content = {"device": _name(device), "rows": rows}
        _write(args.json, (json.dumps(content, indent=2) + "\n").encode())
    if kind.picture and figure:
        from roi_lightning.figures import to_png

        _write(figure, to_png(kind.picture(rows, title)))
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, smallest in _LEAST.items():
        value = getattr(args, name, smallest)
        if value < smallest:
            raise UserError(f"--{name} {value}: it must be at least {smallest}")


def _name(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _show(content: Table, title: str) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    table = RichTable(title=title)
    for i, head in enumerate(content.heads):
        table.add_column(head, justify="right" if i else "left")
    for row in content.rows:
        table.add_row(*row)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    console.print(table)
    console.print(content.note, highlight=False)


def _write(path: Path, content: bytes) -> None:
    from roi_lightning.atomic import written_aside

    with written_aside(path) as partial:
        partial.write_bytes(content)
