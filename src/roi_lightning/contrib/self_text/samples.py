"""Documents that a causal language model writes by itself, token by token, at temperature 1 with nothing cut off."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.contrib.self_text.settings import SampleSettings
from roi_lightning.data.packing import find_bos, tokenize
from roi_lightning.errors import UserError

_RUN: Final = 8
_DISTINCT: Final = 0.75
_DROPPED_AT_MOST: Final = 256


@dataclass(frozen=True)
class Document:
    """What a model wrote.

    Attributes:
        text: Without special tokens.
        ended: Whether by itself, not at `max_tokens`.
    """

    text: str
    ended: bool


def start_token(tokenizer: PreTrainedTokenizerBase, start: str | None) -> int:
    """The token that a document follows; see `SampleSettings`.

    Raises:
        UserError: If the tokenizer has no such token.
    """
    if start is not None:
        found = tokenizer.get_vocab().get(start)
        if found is None:
            raise UserError(f"the tokenizer has no token {start!r}; set start to one that documents follow")
        return int(found)
    bos = find_bos(tokenizer)
    token = tokenizer.eos_token_id if bos is None else bos
    if token is None:
        raise UserError("the tokenizer has neither BOS nor EOS; set start to the token that documents follow")
    return int(token)


def end_tokens(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text: those the model names for generation, and its tokenizer's EOS."""
    named: Any = getattr(lm.generation_config, "eos_token_id", None)
    found = [*named] if isinstance(named, list) else [named]
    return [int(token) for token in dict.fromkeys([*found, tokenizer.eos_token_id]) if token is not None]


def sample_documents(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: SampleSettings,
    numbers: range,
    report: Callable[[int], object] = lambda _: None,
) -> list[Document]:
    """Have a model write documents, side by side.

    All begin at once, so that no attention mask is needed, and one that has ended leaves the batch.

    Args:
        lm: The model; its mode is left as it was.
        tokenizer: Its own.
        settings: Which.
        numbers: Of the documents, each of which is a function of seed and number (and of rounding).
        report: Is told after every token how many have been drawn.

    Raises:
        UserError: If the tokenizer has no token to start with.
    """
    start = start_token(tokenizer, settings.start)
    ends = [*end_tokens(lm, tokenizer), start]  # what stands before a document ends the one before
    draws = [np.random.default_rng([settings.seed, n]).random(settings.max_tokens) for n in numbers]
    training = lm.training
    lm.eval()
    try:
        written = _write(lm, start, ends, torch.from_numpy(np.stack(draws)), report)
    finally:
        lm.train(training)
    return [_document(tokenizer, ids, ends) for ids in written]


@torch.inference_mode()
def _write(
    lm: PreTrainedModel, start: int, ends: list[int], draws: Tensor, report: Callable[[int], object]
) -> list[list[int]]:
    """The tokens of each document, its end included, from numbers in [0, 1), float64 [documents, max_tokens]."""
    device = next(lm.parameters()).device
    written: list[list[int]] = [[] for _ in draws]
    rows, tokens, drawn = torch.arange(len(draws)), torch.full((len(draws),), start), 0
    cache = _cache(lm, draws.shape[1])
    for position in range(draws.shape[1]):
        logits = lm(input_ids=tokens[:, None].to(device), past_key_values=cache, use_cache=True).logits
        tokens = draw_tokens(logits[:, -1], draws[rows, position].to(device)).cpu()
        drawn += len(rows)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            written[row].append(token)
        report(drawn)
        going = ~torch.isin(tokens, torch.tensor(ends))
        if not going.any():
            break
        if not going.all():
            rows, tokens = rows[going], tokens[going]
            cache.batch_select_indices(going.nonzero().flatten().to(device))
    return written


def _cache(lm: PreTrainedModel, longest: int) -> DynamicCache:
    """A cache as the model makes one, with room from the start."""
    cache = DynamicCache(config=lm.config)
    cache.layers = [_Rows(longest) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _Rows(DynamicLayer):
    """Keys and values of sequences that get a token at a time, in memory that is not copied for each.

    Args:
        longest: Tokens of a sequence at most.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.longest = longest
        self._rooms: list[Tensor] = []  # [batch, heads, longest, head size] of keys, of values

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        new = key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self._rooms = [x.new_empty(*x.shape[:2], self.longest, x.shape[3]) for x in new]
        at = self.get_seq_length()
        for room, states in zip(self._rooms, new, strict=True):
            room[:, :, at : at + 1] = states
        self.keys, self.values = (room[:, :, : at + 1] for room in self._rooms)
        return self.keys, self.values

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        self._rooms = [room[indices] for room in self._rooms]
        self.keys, self.values = (room[:, :, :length] for room in self._rooms)


def draw_tokens(logits: Tensor, draws: Tensor) -> Tensor:
    """Draw a token a row from its softmax, by the inverse of the cumulative distribution.

    Args:
        logits: [rows, vocabulary].
        draws: Numbers in [0, 1), float64 [rows].

    Returns:
        Token ids, int64 [rows].
    """
    cumulative = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
    # The last sum is 1 except for rounding.
    found = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    return found.squeeze(1).clamp(max=logits.shape[-1] - 1)


def _document(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: list[int]) -> Document:
    ended = ids[-1] in ends
    text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return Document(text, ended)


@dataclass
class Selection:
    """Which of the documents that a model wrote are kept, in the order of their numbers.

    Whichever ended first does not count, or short ones would be preferred. Dropped are those without text, repeats of
    one that is kept, and loops: documents of whose runs of eight tokens less than three quarters are distinct.

    Attributes:
        tokenizer: Counts tokens, as they are counted where the text is read.
        texts: The kept ones, in order.
        tokens: In these.
        ended: How many of these the model ended itself.
        dropped: How many were not kept, by reason.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: dict[str, None] = field(default_factory=dict)  # a set in order
    tokens: int = 0
    ended: int = 0
    dropped: Counter[str] = field(default_factory=lambda: Counter(empty=0, repeats=0, loops=0))
    _in_a_row: int = 0

    @property
    def written(self) -> int:
        """How many documents there were."""
        return len(self.texts) + self.dropped.total()

    def add(self, documents: Sequence[Document], enough: int) -> None:
        """Keep or drop documents, until the kept ones hold `enough` tokens.

        Raises:
            UserError: If the model writes next to nothing that can be kept.
        """
        for document in documents:
            if self.tokens < enough:
                self._add(document)
        if self._in_a_row >= _DROPPED_AT_MOST:
            counts = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise UserError(
                f"the model writes no text: its last {self._in_a_row} documents were dropped (in all {counts}); "
                "set start to the token that documents follow, or use a real corpus"
            )

    def _add(self, document: Document) -> None:
        ids = tokenize([document.text], self.tokenizer)[0].tolist()
        if not document.text.strip():
            self._drop("empty")
        elif document.text in self.texts:
            self._drop("repeats")
        elif distinct_share(ids) < _DISTINCT:
            self._drop("loops")
        else:
            self.texts[document.text] = None
            self.tokens += len(ids)
            self.ended += document.ended
            self._in_a_row = 0

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        self._in_a_row += 1

    def next_batch(self, settings: SampleSettings, most: int) -> range:
        """The numbers of the documents to be written next: about as many as are missing."""
        mean = self.tokens / self.written if self.tokens else settings.max_tokens
        rows = min(most, ceil((settings.tokens - self.tokens) / mean))
        return range(self.written, self.written + rows)

    def facts(self) -> dict[str, Any]:
        """Plain values."""
        counts = {"documents": len(self.texts), "tokens": self.tokens, "ended": self.ended}
        return counts | {"dropped": dict(self.dropped)}


def distinct_share(ids: Sequence[int]) -> float:
    """Of the runs of eight tokens in a document, the share that is distinct; 1 where there are none."""
    runs = [tuple(ids[i : i + _RUN]) for i in range(len(ids) - _RUN + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
