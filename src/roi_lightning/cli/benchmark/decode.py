"""`benchmark decode`: real generation with packed 2:4 layers against the same model dense."""

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from roi_lightning.cli.benchmark.kind import Kind, Row, Table, numbers, spread

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from roi_lightning.benchmark.timing import Ratio

_DECODE: Final = "decode.packed_over_dense"
_HEAD: Final = (
    *("batch", "", "dense tokens/s", "spread", "packed tokens/s", "spread", "×"),
    *("dense ≤", "packed ≤", "dense MB", "packed MB", "tokens"),
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lm", required=True, help="an exported 2:4 directory; with --random any model")
    add(
        "--random", action="store_true", help="random 2:4 weights in bfloat16; only the configuration is read"
    )
    add("--batch", default="1,4,16", help="sequences, separated by commas (default: %(default)s)")
    add(
        "--prompt",
        type=int,
        default=32,
        help="tokens of each before the first new one (default: %(default)s)",
    )
    add("--tokens", type=int, default=32, help="new ones of each (default: %(default)s)")
    add("--large_batches", action="store_true", help="with the second packing for large batches, on GPUs")
    add("--compile", action="store_true", help="compile the pass that decodes, with a cache of fixed size")


def _measure(args: argparse.Namespace, device: "torch.device") -> Iterable["Ratio"]:
    batches = numbers("--batch", args.batch, "1,4,16")
    from roi_lightning.benchmark import DecodeBenchmark
    from roi_lightning.benchmark.generation import GenerationConfig, random_prompts, text_prompts
    from roi_lightning.benchmark.models import check_source, make_pair, random_model, stored_model
    from roi_lightning.models.config import load_tokenizer
    from roi_lightning.models.source import resolve_model
    from roi_lightning.runtime.semi_structured import check_device

    source = resolve_model(args.lm)
    check_source(source, args.prompt + args.tokens)
    if args.large_batches:
        check_device(device)
    if args.random:
        lm = random_model(source, device)
        prompts = partial(random_prompts, lm.config.get_text_config().vocab_size)
    else:
        prompts = partial(text_prompts, load_tokenizer(source.spec))
        lm = stored_model(source, device)
    config = GenerationConfig(args.tokens, args.compile)
    pair = make_pair(lm, args.large_batches)
    return DecodeBenchmark(pair, prompts, batches, args.prompt, config, args.rounds).run(device)


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    return Table(_HEAD, [_cells(row) for row in rows], _note(rows[-1]))


def _cells(row: Row) -> tuple[str, ...]:
    decode = row["name"] == _DECODE
    kinds = "reference_", ""
    return (
        f"{row['batch']}",
        row["name"].partition(".")[0],
        *(cell for whose in kinds for cell in (f"{row[f'{whose}tokens_per_s']:,.1f}", spread(row, whose))),
        f"{row['ratio']:,.2f}",
        *(f"{row[f'{whose}most_tokens_per_s']:,.1f}" if decode else "" for whose in kinds),
        *(f"{row[f'{whose}bytes_per_token'] / 1e6:,.1f}" if decode else "" for whose in kinds),
        _agreement(row) if decode else "",
    )


def _agreement(row: Row) -> str:
    found = row["divergence"]
    if found is None:
        return "the same"
    return f"{found['sequences']} differ, from {found['position']} on, at most {found['gap']:.2g} units apart"


def _note(row: Row) -> str:
    """What the table's numbers mean, and how it was measured; `row` is any of decoding."""
    left = row["layers_left_dense"]
    return (
        f"Greedy, {row['prompt']} tokens of prompt and {row['tokens']} new ones, {row['dtype']}, {row['attention']} "
        f"attention{', compiled' if row['compiled'] else ''}{f', {left} layers left dense' if left else ''}. "
        f"×: packed tokens/s ÷ dense. MB: of weights, keys and values that a token reads (weights outside the packed "
        f"layers, the head above all, are {row['dense_weight_bytes'] / 1e6:,.1f} MB a step); ≤: tokens/s at the "
        f"{row['bandwidth_bytes_per_s'] / 1e9:,.1f} GB/s that reading a large buffer gives meanwhile. tokens: "
        f"whether both generate the same; a unit is the rounding of logits in {row['dtype']}; few of them are a tie."
    )


def _figure(rows: Sequence[Row], title: str) -> "Figure":
    from roi_lightning.plots.chart import decode_figure

    return decode_figure([row for row in rows if row["name"] == _DECODE], title)


KIND: Final = Kind(
    "generation with packed 2:4 layers against the same model dense",
    3,
    _add_options,
    _measure,
    _table,
    _figure,
)
