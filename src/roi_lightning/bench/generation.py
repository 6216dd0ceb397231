"""Real generation, greedy, of a fixed number of tokens, with the time at which every token was there."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, LogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override


@dataclass(frozen=True)
class Settings:
    """How to generate.

    Attributes:
        tokens: New ones in every sequence; no token ends one.
        compiled: Have transformers compile the forward pass of one token, with a cache of fixed size.
    """

    tokens: int
    compiled: bool = False

    def to_transformers(self) -> GenerationConfig:
        """What `generate` is to be told."""
        plain = GenerationConfig(max_new_tokens=self.tokens, do_sample=False, return_dict_in_generate=True)
        if self.compiled:
            plain.cache_implementation = "static"
            plain.compile_config = CompileConfig()
            plain.compile_config._compile_all_devices = True  # else processors are left out
        return plain


@dataclass(frozen=True)
class Generated:
    """What one call of `generate` made.

    Attributes:
        tokens: The new ones, [batch, tokens], on the CPU.
        prefill_s: Seconds from the prompt to the first token of every sequence.
        decode_s: Seconds from the first to the last token.
        cache_bytes: Of keys and values at the end; 0 for a model that returns no such cache.
    """

    tokens: Tensor
    prefill_s: float
    decode_s: float
    cache_bytes: int


def generate(lm: PreTrainedModel, ids: Tensor, settings: Settings) -> Generated:
    """Go on from prompts.

    Args:
        lm: In eval mode.
        ids: The prompts, int64 [batch, tokens], on the model's device.
        settings: How many tokens, and how.
    """
    clock = _Clock()
    out = _call(lm, ids, settings, streamer=clock)
    prompt, first, *_, last = clock.times
    cache_bytes = _cache_bytes(getattr(out, "past_key_values", None))
    return Generated(out.sequences[:, ids.shape[1] :].cpu(), first - prompt, last - first, cache_bytes)


def scores_at(
    lm: PreTrainedModel, ids: Tensor, settings: Settings, positions: Mapping[int, int]
) -> dict[int, Tensor]:
    """Logits from which the tokens at some positions were chosen, by generating once more.

    Args:
        lm: As for `generate`.
        ids: As for `generate`.
        settings: As for `generate`.
        positions: Sequence → position among the new tokens.

    Returns:
        Sequence → fp32 [vocabulary].
    """
    watch = _Watch(positions)
    _call(lm, ids, settings, logits_processor=[watch])
    return watch.scores


def _call(lm: PreTrainedModel, ids: Tensor, settings: Settings, **options: Any) -> Any:
    lm.generation_config = GenerationConfig()  # what a model brings must not end a sequence, or sample
    config, mask = settings.to_transformers(), torch.ones_like(ids)
    return lm.generate(ids, attention_mask=mask, generation_config=config, **options)  # type: ignore[operator]


def _cache_bytes(cache: Any) -> int:
    parts = [
        getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")
    ]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


class _Clock(BaseStreamer):
    """Notes when the prompt was taken and when every token lay on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @override
    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())

    @override
    def end(self) -> None:
        pass


class _Watch(LogitsProcessor):
    """Keeps the logits of one step of each sequence."""

    def __init__(self, positions: Mapping[int, int]) -> None:
        self.scores: dict[int, Tensor] = {}
        self._positions, self._step = positions, 0

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for sequence, position in self._positions.items():
            if position == self._step:
                self.scores[sequence] = scores[sequence].float().cpu()
        self._step += 1
        return scores
