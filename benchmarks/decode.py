"""Generation with packed 2:4 layers against the same model dense: prefill, decoding, and where the tokens differ.

python -m benchmarks.decode --lm EXPORT --batch 1,4,16 --json F.json --figure F.png
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.speed.chart import decode_figure
from benchmarks.speed.generation import (
    Generated,
    GenerationConfig,
    generate,
    random_prompts,
    scores_at,
    text_prompts,
)
from benchmarks.speed.models import Pair, check_source, make_pair, random_model
from benchmarks.speed.script import Row, Script, Table, numbers, positive, spread
from benchmarks.speed.timing import (
    BufferRead,
    Speedup,
    mean_cache_bytes,
    results_in_turns,
    seconds,
    weight_bytes,
)
from roi_lightning.contrib.packed.format import PATTERN
from roi_lightning.models.config import load_tokenizer
from roi_lightning.models.loading import plain_language_model
from roi_lightning.models.source import resolve_model

_DENSE: Final = "dense"
_PACKED: Final = "packed"
_READ: Final = "read"
_DECODE: Final = "decode.packed_over_dense"
_HEAD: Final = (
    *("batch", "", "dense tokens/s", "spread", "packed tokens/s", "spread", "×"),
    *("dense ≤", "packed ≤", "dense MB", "packed MB", "tokens"),
)
Scores = Callable[[Mapping[int, int]], Mapping[int, Tensor]]


@dataclass(frozen=True)
class _Measured:
    """One batch: what each round generated, and memory's bytes per second meanwhile."""

    dense: list[Generated]
    packed: list[Generated]
    bandwidth: float


@dataclass(frozen=True)
class DecodeBenchmark:
    """What to measure.

    Attributes:
        pair: The model, dense and packed, on the CPU.
        prompts: Prompts of (batch, length), int64.
        batches: Sequences at once, each.
        prompt: Tokens of each sequence before the first new one.
        config: How to continue them.
        rounds: How often.
    """

    pair: Pair
    prompts: Callable[[int, int], Tensor]
    batches: Sequence[int]
    prompt: int
    config: GenerationConfig
    rounds: int

    def run(self) -> Iterator[Speedup]:
        """For each batch the prefill and the decoding after it, dense and packed in turns."""
        read = BufferRead()
        for batch in self.batches:
            ids = self.prompts(batch, self.prompt)
            yield from self._speedups(ids, self._measure(ids, read))

    def _measure(self, ids: Tensor, read: BufferRead) -> _Measured:
        tasks: dict[str, Callable[[], Any]] = {
            _DENSE: partial(generate, self.pair.dense, ids, self.config),
            _PACKED: partial(generate, self.pair.packed, ids, self.config),
            _READ: partial(seconds, read),
        }
        results = results_in_turns(tasks, self.rounds, f"generating, batch {len(ids)}")
        return _Measured(results[_DENSE], results[_PACKED], read.nbytes / median(results[_READ]))

    def _speedups(self, ids: Tensor, measured: _Measured) -> Iterator[Speedup]:
        decoding = self._bytes(measured) | self._divergence(ids, measured)
        for phase, tokens, facts in (
            ("prefill", self.prompt, {}),
            ("decode", self.config.tokens - 1, decoding),
        ):
            packed, dense = ([getattr(x, f"{phase}_s") for x in y] for y in (measured.packed, measured.dense))
            rates = {
                "tokens_per_s": len(ids) * tokens / median(packed),
                "reference_tokens_per_s": len(ids) * tokens / median(dense),
            }
            more = self._setting(len(ids)) | rates | facts
            yield Speedup(f"{phase}.packed_over_dense", str(PATTERN), packed, _DENSE, dense, more)

    def _setting(self, batch: int) -> dict[str, Any]:
        lm = self.pair.dense
        return {
            "batch": batch,
            "prompt": self.prompt,
            "tokens": self.config.tokens,
            "dtype": str(lm.dtype).removeprefix("torch."),
            "attention": lm.config._attn_implementation,
            "compiled": self.config.compiled,
            "layers_left_dense": len(self.pair.accelerated.left),
            "packed_is_fused": self.pair.accelerated.not_fused is None,
        }

    def _bytes(self, measured: _Measured) -> dict[str, Any]:
        """What a step reads, and how many tokens a second memory allows: a step gives one to each sequence."""
        rest = weight_bytes(self.pair.packed) - self.pair.accelerated.bytes_after
        facts: dict[str, Any] = {"bandwidth_bytes_per_s": measured.bandwidth, "dense_weight_bytes": rest}
        kinds = ("", self.pair.packed, measured.packed), ("reference_", self.pair.dense, measured.dense)
        for whose, lm, (first, *_) in kinds:
            batch, new = first.tokens.shape
            weights, cache = weight_bytes(lm), mean_cache_bytes(first.cache_bytes, self.prompt, new)
            facts |= {
                f"{whose}weight_bytes": weights,
                f"{whose}cache_bytes": cache,
                f"{whose}bytes_per_token": (weights + cache) / batch,
                f"{whose}most_tokens_per_s": batch * measured.bandwidth / (weights + cache),
            }
        return facts

    def _divergence(self, ids: Tensor, measured: _Measured) -> dict[str, Any]:
        """Whether both models generate the same, and how near a tie they were where they don't."""
        models = self.pair.dense, self.pair.packed
        dense, packed = (partial(scores_at, lm, ids, self.config) for lm in models)
        tokens = measured.dense[0].tokens, measured.packed[0].tokens
        found = divergence(tokens, (dense, packed), self.pair.dense.dtype)
        return {"same_tokens": found is None, "divergence": None if found is None else asdict(found)}


@dataclass(frozen=True)
class Divergence:
    """How the new tokens of two models differ.

    Attributes:
        sequences: How many differ.
        position: Of the first new token that differs in any of them, counted from 0.
        gap: Of each model's logits, its own token's less the other model's, where a sequence first differs: the
            maximum over sequences, in units of the rounding of these logits. A few of them are a tie.
    """

    sequences: int
    position: int
    gap: float


def divergence(
    tokens: tuple[Tensor, Tensor], scores: tuple[Scores, Scores], dtype: torch.dtype
) -> Divergence | None:
    """Compare what two models generated from the same prompts.

    Args:
        tokens: Of each, [batch, tokens].
        scores: Each model's logits at given positions, sequence → position; not called where all tokens agree.
        dtype: That the logits were rounded to.
    """
    positions = first_differences(*tokens)
    if not positions:
        return None
    gaps = []
    for own, other, logits in zip(tokens, reversed(tokens), (ask(positions) for ask in scores), strict=True):
        for sequence, position in positions.items():
            chosen = int(own[sequence, position]), int(other[sequence, position])
            gaps.append(gap(logits[sequence], *chosen, dtype))
    return Divergence(len(positions), min(positions.values()), max(gaps))


def first_differences(first: Tensor, second: Tensor) -> dict[int, int]:
    """Sequence → the first position at which two [batch, tokens] differ, for sequences that do."""
    differ = first != second
    return {i: int(row.int().argmax()) for i, row in enumerate(differ) if row.any()}


def gap(logits: Tensor, chosen: int, other: int, dtype: torch.dtype) -> float:
    """How far one token's logit is above another's, in units of the larger one's rounding.

    Args:
        logits: [vocabulary].
        chosen: The one token.
        other: The other.
        dtype: That the logits were rounded to.
    """
    high, low = float(logits[chosen]), float(logits[other])
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(high), abs(low), info.tiny))
    return (high - low) / math.ldexp(info.eps, exponent - 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    add = parser.add_argument
    add("--lm", required=True, help="an exported 2:4 directory; with --random any model")
    add(
        "--random", action="store_true", help="random 2:4 weights in bfloat16; only the configuration is read"
    )
    add(
        "--batch",
        type=numbers,
        default="1,4,16",
        help="sequences, separated by commas (default: %(default)s)",
    )
    add(
        "--prompt",
        type=positive,
        default=32,
        help="tokens of each before the first new one (default: %(default)s)",
    )
    add("--tokens", type=positive, default=32, help="new ones of each (default: %(default)s)")
    add("--compile", action="store_true", help="compile the pass that decodes, with a cache of fixed size")
    Script(parser, _measure, _table, 3, _figure).run(argv)


def _measure(args: argparse.Namespace) -> Iterator[Speedup]:
    source = resolve_model(args.lm)
    check_source(source, args.prompt + args.tokens)
    if args.random:
        lm = random_model(source)
        prompts = partial(random_prompts, lm.config.get_text_config().vocab_size)
    else:
        prompts = partial(text_prompts, load_tokenizer(source.spec))
        lm = plain_language_model(source)
    config = GenerationConfig(args.tokens, args.compile)
    return DecodeBenchmark(make_pair(lm), prompts, args.batch, args.prompt, config, args.rounds).run()


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


def _figure(rows: Sequence[Row], machine: str) -> Figure:
    return decode_figure([row for row in rows if row["name"] == _DECODE], machine)


if __name__ == "__main__":
    main()
