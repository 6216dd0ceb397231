"""Prompts, and greedy generation of a fixed number of tokens after them, timed token by token."""

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import CompileConfig, LogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.data.files import python_documents
from roi_lightning.data.packing import Packer, find_bos, tokenize


@dataclass(frozen=True)
class GenerationConfig:
    """How to generate.

    Attributes:
        tokens: New ones in every sequence; no token ends one.
        compiled: Have transformers compile the forward pass of one token, with a cache of fixed size.
    """

    tokens: int
    compiled: bool = False

    def to_transformers(self) -> transformers.GenerationConfig:
        """The same for `generate`."""
        config = transformers.GenerationConfig(
            max_new_tokens=self.tokens, do_sample=False, return_dict_in_generate=True
        )
        if self.compiled:
            config.cache_implementation = "static"
            config.compile_config = CompileConfig()
            config.compile_config._compile_all_devices = True  # else CPUs are left out
        return config


@dataclass(frozen=True)
class Generated:
    """The result of one call of `generate`.

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


def generate(lm: PreTrainedModel, ids: Tensor, config: GenerationConfig) -> Generated:
    """Continue prompts.

    Args:
        lm: In eval mode.
        ids: The prompts, int64 [batch, tokens], on the model's device.
        config: How many tokens, and how.
    """
    clock = _Clock()
    out = _call(lm, ids, config, streamer=clock)
    prompt, first, *_, last = clock.times
    cache_bytes = _cache_bytes(getattr(out, "past_key_values", None))
    return Generated(out.sequences[:, ids.shape[1] :].cpu(), first - prompt, last - first, cache_bytes)


def scores_at(
    lm: PreTrainedModel, ids: Tensor, config: GenerationConfig, positions: Mapping[int, int]
) -> dict[int, Tensor]:
    """Logits from which the tokens at some positions were chosen, by generating once more.

    Args:
        lm: As for `generate`.
        ids: As for `generate`.
        config: As for `generate`.
        positions: Sequence → position among the new tokens.

    Returns:
        Sequence → fp32 [vocabulary].
    """
    recorder = _ScoreRecorder(positions)
    _call(lm, ids, config, logits_processor=[recorder])
    return recorder.scores


def _call(lm: PreTrainedModel, ids: Tensor, config: GenerationConfig, **options: Any) -> Any:
    lm.generation_config = (
        transformers.GenerationConfig()
    )  # the model's own must not end a sequence, or sample
    mask, generation = torch.ones_like(ids), config.to_transformers()
    return lm.generate(ids, attention_mask=mask, generation_config=generation, **options)  # type: ignore[operator]


def _cache_bytes(cache: Any) -> int:
    parts = [
        getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")
    ]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


class _Clock(BaseStreamer):
    """Records when the prompt was taken and when every token was on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @override
    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())

    @override
    def end(self) -> None:
        pass


class _ScoreRecorder(LogitsProcessor):
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


def text_prompts(tokenizer: PreTrainedTokenizerBase, batch: int, length: int) -> Tensor:
    """Consecutive windows of the documentation that comes with Python, repeated as needed, int64 [batch, length].

    Each begins with the BOS that the tokenizer puts before a text, if it does.
    """
    packer = Packer(length, None, find_bos(tokenizer))
    documents = cycle(python_documents(sysconfig.get_paths()["stdlib"], ""))
    windows = (window for x in documents for window in packer(tokenize([x["text"]], tokenizer)))
    return torch.from_numpy(np.stack([*islice(windows, batch)])).long()


def random_prompts(vocabulary: int, batch: int, length: int) -> Tensor:
    """The same random tokens every time, int64 [batch, length]."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
