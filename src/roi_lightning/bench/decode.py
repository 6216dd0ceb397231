"""Generation with packed 2:4 layers against the same model dense: the prompt and the tokens after it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.bench.divergence import divergence
from roi_lightning.bench.generation import Generated, Settings, generate, scores_at
from roi_lightning.bench.memory import Reading
from roi_lightning.bench.pairs import Pair
from roi_lightning.bench.timing import Speedup, results_in_turns, seconds
from roi_lightning.bench.traffic import mean_cache_bytes, most_tokens_per_second, weight_bytes
from roi_lightning.runtime.packing import PATTERN

_DENSE: Final = "dense"
_PACKED: Final = "packed"
_READ: Final = "read"


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        pair: The model, dense and packed, on the device.
        prompts: Prompts of (batch, length), int64.
        batches: Sequences at once, each.
        prompt: Tokens of each sequence before the first new one.
        settings: How to go on from there.
        rounds: How often.
    """

    pair: Pair
    prompts: Callable[[int, int], Tensor]
    batches: Sequence[int]
    prompt: int
    settings: Settings
    rounds: int


@dataclass(frozen=True)
class _Measured:
    """One batch: what each round generated, and the bytes a second that memory gave meanwhile."""

    dense: list[Generated]
    packed: list[Generated]
    bandwidth: float


def decode_figures(job: Job, device: torch.device) -> Iterator[Speedup]:
    """For each batch the pass over the prompts and the decoding after it, dense and packed in turns."""
    reading = Reading(device)
    for batch in job.batches:
        ids = job.prompts(batch, job.prompt).to(device)
        yield from _figures(job, ids, _measure(job, ids, reading))


def _measure(job: Job, ids: Tensor, reading: Reading) -> _Measured:
    tasks: dict[str, Callable[[], Any]] = {
        _DENSE: partial(generate, job.pair.dense, ids, job.settings),
        _PACKED: partial(generate, job.pair.packed, ids, job.settings),
        _READ: partial(seconds, reading, ids.device),
    }
    found = results_in_turns(tasks, job.rounds)
    return _Measured(found[_DENSE], found[_PACKED], reading.nbytes / median(found[_READ]))


def _figures(job: Job, ids: Tensor, measured: _Measured) -> Iterator[Speedup]:
    for phase, facts in (("prefill", {}), ("decode", _bytes(job, measured) | _tokens(job, ids, measured))):
        packed, dense = ([getattr(one, f"{phase}_s") for one in x] for x in (measured.packed, measured.dense))
        counted = job.prompt if phase == "prefill" else job.settings.tokens - 1
        rates = {
            "tokens_per_s": len(ids) * counted / median(packed),
            "reference_tokens_per_s": len(ids) * counted / median(dense),
        }
        more = _setting(job, len(ids)) | rates | facts
        yield Speedup(f"{phase}.packed_over_dense", str(PATTERN), packed, _DENSE, dense, more)


def _setting(job: Job, batch: int) -> dict[str, Any]:
    lm = job.pair.dense
    return {
        "batch": batch,
        "prompt": job.prompt,
        "tokens": job.settings.tokens,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "attention": lm.config._attn_implementation,
        "compiled": job.settings.compiled,
        "layers_left_dense": len(job.pair.accelerated.left),
    }


def _bytes(job: Job, measured: _Measured) -> dict[str, Any]:
    """What a step reads, and how many tokens a second that allows."""
    rest = weight_bytes(job.pair.packed) - job.pair.accelerated.bytes_after
    facts: dict[str, Any] = {"bandwidth_bytes_per_s": measured.bandwidth, "dense_weight_bytes": rest}
    kinds = ("", job.pair.packed, measured.packed), ("reference_", job.pair.dense, measured.dense)
    for whose, lm, (first, *_) in kinds:
        batch, new = first.tokens.shape
        weights, cache = weight_bytes(lm), mean_cache_bytes(first.cache_bytes, job.prompt, new)
        facts |= {
            f"{whose}weight_bytes": weights,
            f"{whose}cache_bytes": cache,
            f"{whose}bytes_per_token": (weights + cache) / batch,
            f"{whose}most_tokens_per_s": most_tokens_per_second(batch, weights + cache, measured.bandwidth),
        }
    return facts


def _tokens(job: Job, ids: Tensor, measured: _Measured) -> dict[str, Any]:
    """Whether both models say the same, and by how little they part where they do."""
    pair = job.pair
    found = divergence(
        (measured.dense[0].tokens, measured.packed[0].tokens),
        (
            partial(scores_at, pair.dense, ids, job.settings),
            partial(scores_at, pair.packed, ids, job.settings),
        ),
        pair.dense.dtype,
    )
    return {"same_tokens": found is None, "divergence": None if found is None else asdict(found)}
