"""Generation with packed 2:4 layers against the same model dense: prefill, decoding, and where the tokens differ."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.benchmark.generation import Generated, GenerationConfig, generate, scores_at
from roi_lightning.benchmark.models import Pair
from roi_lightning.benchmark.timing import (
    BufferRead,
    Speedup,
    mean_cache_bytes,
    results_in_turns,
    seconds,
    weight_bytes,
)
from roi_lightning.runtime.packed_format import PATTERN

_DENSE: Final = "dense"
_PACKED: Final = "packed"
_READ: Final = "read"
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
        pair: The model, dense and packed, on the device.
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

    def run(self, device: torch.device) -> Iterator[Speedup]:
        """For each batch the prefill and the decoding after it, dense and packed in turns."""
        read = BufferRead(device)
        for batch in self.batches:
            ids = self.prompts(batch, self.prompt).to(device)
            yield from self._speedups(ids, self._measure(ids, read))

    def _measure(self, ids: Tensor, read: BufferRead) -> _Measured:
        tasks: dict[str, Callable[[], Any]] = {
            _DENSE: partial(generate, self.pair.dense, ids, self.config),
            _PACKED: partial(generate, self.pair.packed, ids, self.config),
            _READ: partial(seconds, read, ids.device),
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
