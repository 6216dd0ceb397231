"""Token perplexity: text cut into windows that do not overlap; the first token of each is context only."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.evaluation.predictions import every_next_token, predict
from roi_lightning.progress import progress


@dataclass(frozen=True)
class Cut:
    """How a text becomes windows.

    Attributes:
        length: Tokens per window, at least 2.
        keep_tail: Whether the shorter rest counts too, weighted by its tokens. Wanda and SparseGPT drop it.
        limit: The first so many windows; None for all.
    """

    length: int
    keep_tail: bool = True
    limit: int | None = None

    def check(self, tokens: int) -> None:
        """Refuse a text of which no window comes.

        Raises:
            UserError: If there are too few tokens.
        """
        least = 2 if self.keep_tail else self.length
        if tokens < least:
            raise UserError(
                f"the text has {tokens} tokens and at least {least} are needed; give a longer --text"
            )

    def batches(self, ids: Tensor, size: int) -> list[Tensor]:
        """The windows of a text, int64 [tokens], as batches [up to `size`, length], the tail by itself."""
        whole = len(ids) // self.length
        count = whole if self.limit is None else min(whole, self.limit)
        windows = ids[: count * self.length].view(count, self.length)
        tail = ids[whole * self.length :]
        with_tail = self.keep_tail and len(tail) > 1 and (self.limit is None or whole < self.limit)
        return [*(windows.split(size) if count else ()), *([tail[None]] if with_tail else ())]


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
        ids: [tokens] token ids of the text.
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
