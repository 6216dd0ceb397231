"""Token perplexity: text cut into windows that do not overlap.

The first token of a window is context only. Where that is a BOS, every token of the text is predicted once.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.evaluation.predictions import every_next_token, predict
from roi_lightning.progress import progress


@dataclass(frozen=True)
class Cut:
    """How a text becomes windows.

    Attributes:
        length: Tokens per window, BOS included; at least 2.
        keep_tail: Whether the shorter rest counts too, weighted by its tokens. Wanda and SparseGPT drop it.
        limit: The first so many windows; None for all.
        bos: Token id that every window begins with; None for text alone.
    """

    length: int
    keep_tail: bool = True
    limit: int | None = None
    bos: int | None = None

    @property
    def text_length(self) -> int:
        """Tokens of text per window."""
        return self.length - (self.bos is not None)

    @property
    def shortest_tail(self) -> int:
        """Tokens of text of which one is predicted."""
        return 2 - (self.bos is not None)

    def check(self, tokens: int) -> None:
        """Refuse a text of which no window comes.

        Raises:
            UserError: If there are too few tokens.
        """
        least = self.shortest_tail if self.keep_tail else self.text_length
        if tokens < least:
            raise UserError(
                f"the text has {tokens} tokens and at least {least} are needed; give a longer --text"
            )

    def batches(self, ids: Tensor, size: int) -> list[Tensor]:
        """The windows of a text, int64 [tokens], as batches [up to `size`, length], the tail by itself.

        The text comes without a BOS where the windows have one.
        """
        whole = len(ids) // self.text_length
        count = whole if self.limit is None else min(whole, self.limit)
        windows = ids[: count * self.text_length].view(count, self.text_length)
        tail = ids[None, whole * self.text_length :]
        long_enough = tail.shape[1] >= self.shortest_tail
        with_tail = self.keep_tail and long_enough and (self.limit is None or whole < self.limit)
        batches = [*(windows.split(size) if count else ()), *([tail] if with_tail else ())]
        return [self._opened(batch) for batch in batches]

    def _opened(self, text: Tensor) -> Tensor:
        return text if self.bos is None else torch.cat([torch.full_like(text[:, :1], self.bos), text], 1)


def window_perplexity(lm: PreTrainedModel, windows: Tensor, batch_size: int = 1) -> float:
    """Token perplexity: exp of the mean negative log-likelihood over all predicted tokens.

    Args:
        lm: The model, in whatever mode its layers are.
        windows: [count, seq_len] token ids; the first token of each window is context only.
        batch_size: Windows per forward pass.

    Returns:
        The perplexity; infinite where the mean exceeds what exp can hold.
    """
    return _perplexity(lm, windows.split(batch_size))


def token_perplexity(
    lm: PreTrainedModel, ids: Tensor, cut: Cut, batch_size: int, description: str = "token perplexity"
) -> float:
    """Token perplexity of a text.

    Args:
        lm: The model.
        ids: [tokens] token ids of the text, as `cut` wants them (`encode_text`).
        cut: How it becomes windows.
        batch_size: Windows per forward pass.
        description: For the progress report.

    Raises:
        UserError: If the text is too short for a window.
    """
    cut.check(len(ids))
    batches: Sequence[Tensor] = cut.batches(ids, batch_size)
    return _perplexity(lm, progress(batches, description))


def _perplexity(lm: PreTrainedModel, batches: Iterable[Tensor]) -> float:
    device = next(lm.parameters()).device
    total, count = 0.0, 0
    for batch in batches:
        input_ids = batch.to(device)
        log_probs, _ = predict(lm, input_ids, every_next_token(input_ids))
        total -= float(log_probs.double().sum())
        count += len(log_probs)
    mean = total / count
    return math.inf if mean > 700 else math.exp(mean)
