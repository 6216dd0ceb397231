"""`prune MODEL --method METHOD --pattern N:M --out DIR`: a mask without training."""

import argparse
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from roi_lightning.errors import UserError

if TYPE_CHECKING:
    from roi_lightning.export.base import BaseTensors
    from roi_lightning.masks import MaskSet
    from roi_lightning.oneshot import Calibration, OneShotMethod
    from roi_lightning.pattern import NMPattern
    from roi_lightning.sources import ModelSource

_METHODS = ("magnitude", "wanda", "sparsegpt")
# What options stand for that are left out; None there tells that a method was not given one it does not have.
_TEXT: Final = {
    "data": ["python-docs"],
    "windows": 128,
    "seq_len": 2048,
    "seed": 0,
    "activations": "sequential",
    "device": "auto",
    "spill": None,
}


def build_parser() -> argparse.ArgumentParser:
    """The options of `prune`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning prune",
        description="Choose N of every M weights without training, layer after layer, and write the same "
        "directory and mask file as a learned mask gets.",
    )
    parser.add_argument("model", metavar="MODEL", help="hub id, directory, or GGUF file")
    parser.add_argument("--method", required=True, help="magnitude (reads no text), wanda, sparsegpt")
    parser.add_argument("--pattern", default="2:4", help="N:M, N kept of M (default: %(default)s)")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export there")
    _add_text(parser.add_argument_group("calibration text"))
    _add_model(parser.add_argument_group("model"))
    _add_sparsegpt(parser.add_argument_group("sparsegpt"))
    return parser


def _add_text(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--data",
        nargs="+",
        metavar="CORPUS",
        help="as in data.corpora: files, globs, hub ids, python-docs, or mappings like "
        "'{source: x.jsonl, text_field: body}' (default: python-docs)",
    )
    group.add_argument("--windows", type=int, help="how many (default: 128)")
    group.add_argument("--seq_len", type=int, help="tokens of each (default: 2048)")
    group.add_argument("--seed", type=int, help="of the choice of windows (default: 0)")
    group.add_argument(
        "--activations",
        choices=["sequential", "dense"],
        help="what a block meets: what the pruned blocks before it give, or, in half the passes, what the "
        "unpruned ones would (default: sequential)",
    )
    group.add_argument("--device", help="where blocks run: auto, cpu, cuda, cuda:1 (default: auto)")
    group.add_argument(
        "--spill", metavar="DIR", type=Path, help="keep hidden states in a file there, not in memory"
    )


def _add_model(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="in which the model runs, and a GGUF model is saved (default: as stored; bfloat16 for GGUF)",
    )
    group.add_argument("--targets", nargs="+", default=["*"], metavar="GLOB", help="layers to prune")
    group.add_argument("--ignore", nargs="+", default=[], metavar="GLOB", help="layers to leave dense")
    group.add_argument("--trust_remote_code", action="store_true", help="run the model repository's code")


def _add_sparsegpt(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--mask_only",
        action="store_true",
        default=None,
        help="keep the survivors' values; otherwise they are updated",
    )
    group.add_argument("--damping", type=float, help="share of the Hessian's mean diagonal (default: 0.01)")
    group.add_argument("--block_size", type=int, help="columns at a time (default: 128)")


def main(argv: Sequence[str]) -> int:
    """Prune, write, verify, and say what was done.

    Returns:
        0.

    Raises:
        UserError: For anything that can't be pruned, read or written.
    """
    args = build_parser().parse_args(argv)
    method = make_method(args)
    from roi_lightning.export import check_not_base, open_base
    from roi_lightning.oneshot import CalibratedMethod
    from roi_lightning.pattern import NMPattern
    from roi_lightning.prunable import check_model
    from roi_lightning.sources import resolve_model

    _fill_text_options(args, reads_text=isinstance(method, CalibratedMethod))
    source, pattern = resolve_model(args.model, args.revision), NMPattern(args.pattern)
    check_model(source, pattern, args.targets, args.ignore, args.trust_remote_code)
    check_not_base(args.out.absolute(), source)
    _check_room(args, method, None if source.kind == "gguf" else open_base(source))
    facts: dict[str, object] = {"method": args.method, **method.facts(), **_selection(args)}
    calibration = None
    if isinstance(method, CalibratedMethod):
        calibration = _calibration(args, source)
        facts |= {"activations": args.activations, "text": ", ".join(args.data), "seed": args.seed}
        facts |= {"windows": args.windows, "seq_len": args.seq_len, "tokens": calibration.windows.numel()}
    return _prune(args, source, method, pattern, calibration, facts)


def make_method(args: argparse.Namespace) -> "OneShotMethod":
    """The method that was asked for.

    Raises:
        UserError: If there is no such method, or an option is given that it does not have.
    """
    if args.method not in _METHODS:
        near = get_close_matches(args.method, _METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"no method {args.method!r}: choose among {', '.join(_METHODS)}{hint}")
    from roi_lightning.oneshot import METHODS

    given = {"damping": args.damping, "block_size": args.block_size}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if args.mask_only:
        options["update_weights"] = False
    if options and args.method != "sparsegpt":
        name = "mask_only" if args.mask_only else next(iter(options))
        raise UserError(
            f"--{name} is an option of sparsegpt and means nothing to {args.method}; leave it out"
        )
    return METHODS[args.method](**options)


def _selection(args: argparse.Namespace) -> dict[str, object]:
    """Which layers were asked for, where that was not all."""
    chosen = {"targets": args.targets, "ignore": args.ignore}
    return {name: " ".join(globs) for name, globs in chosen.items() if globs not in (["*"], [])}


def _fill_text_options(args: argparse.Namespace, reads_text: bool) -> None:
    given = [name for name in _TEXT if getattr(args, name) is not None]
    if given and not reads_text:
        raise UserError(f"--{given[0]} means nothing to {args.method}, which reads no text; leave it out")
    for name in _TEXT.keys() - set(given):
        setattr(args, name, _TEXT[name])
    for name, least in (("windows", 1), ("seq_len", 2), ("seed", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} is {getattr(args, name)}; give at least {least}")


def _check_room(args: argparse.Namespace, method: "OneShotMethod", base: "BaseTensors | None") -> None:
    """Refuse a place that can't take the result, as far as its size is known."""
    from roi_lightning.export import check_destination, needed_bytes
    from roi_lightning.oneshot import SparseGPT

    # Updated weights wait beside the directory until it is written.
    copies = (
        base.nbytes if base is not None and isinstance(method, SparseGPT) and method.updates_weights else 0
    )
    size = None if base is None else needed_bytes(base) + copies
    check_destination(args.out, size, overwrite=args.overwrite)


def _calibration(args: argparse.Namespace, source: "ModelSource") -> "Calibration":
    from roi_lightning.data import CalibrationDataModule, Corpus, parse_corpus
    from roi_lightning.devices import choose_device
    from roi_lightning.language_model import load_config, max_positions
    from roi_lightning.oneshot import Calibration, calibration_windows

    device = choose_device(args.device)
    corpora: list[Corpus | str] = [parse_corpus(text) for text in args.data]
    # Held-out text of its own, so that all of what is given is for calibration.
    data = CalibrationDataModule(
        args.model,
        tokenizer_revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        corpora=corpora,
        val_corpora=corpora,
        seq_len=args.seq_len,
        seed=args.seed,
    )
    longest = max_positions(load_config(source, args.trust_remote_code))
    windows = calibration_windows(data, args.windows, longest)
    return Calibration(windows, args.activations, device, args.spill)


def _prune(
    args: argparse.Namespace,
    source: "ModelSource",
    method: "OneShotMethod",
    pattern: "NMPattern",
    calibration: "Calibration | None",
    facts: dict[str, object],
) -> int:
    from roi_lightning.export import open_base, write_export
    from roi_lightning.language_model import load_language_model
    from roi_lightning.oneshot import TensorStore, prune_model
    from roi_lightning.prunable import prunable_layers

    lm = load_language_model(source, args.dtype, args.trust_remote_code)
    if source.kind == "gguf":  # its size as a directory is known only now
        _check_room(args, method, open_base(source, str(lm.dtype).removeprefix("torch."), lm))
    layers = prunable_layers(lm, args.targets, args.ignore)
    started = time.monotonic()
    with TensorStore.beside(args.out) as updates:
        masks = prune_model(source, lm, layers, method, pattern, calibration, updates.put)
        facts |= {"seconds": round(time.monotonic() - started, 1)}
        out = write_export(
            source, masks, args.out, updates=updates, training=facts, lm=lm, overwrite=args.overwrite
        )
    _show(facts, masks, out)
    return 0


def _show(facts: dict[str, object], masks: "MaskSet", out: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{masks.base.spec} at {masks.pattern}", show_header=False)
    for name, value in facts.items():
        table.add_row(name, Text(str(value)))
    table.add_row("kept", f"{masks.kept:,} of {masks.total:,} weights in {len(masks.layers)} layers")
    table.add_row("updated", f"survivors of {len(masks.updated)} layers" if masks.updated else "no weight")
    console = Console()
    console.print(table)
    console.print(Text(f"{out}: written and verified"), soft_wrap=True)
