"""Log-probabilities of chosen tokens, without ever holding the logits of a whole batch.

The logits of 4,096 tokens over a vocabulary of 152 k are 2.5 GB in fp32. Here the body of a model runs once
and its head a slice of positions at a time. The head is never called by name: the model's own forward runs
for each slice on a body that hands out what it computed before, so that soft caps, scales and tied
embeddings are applied as the model applies them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data.packing import IGNORED

_SLICE_TOKENS: Final = 256


@dataclass(frozen=True)
class TokenPositions:
    """Positions of a batch and the token that is expected after each; int64 [count] all three.

    Attributes:
        rows: Which sequence of the batch.
        columns: Which position of it: the last one that the prediction may see.
        targets: The token that follows there.
    """

    rows: Tensor
    columns: Tensor
    targets: Tensor


def every_next_token(input_ids: Tensor, labels: Tensor | None = None) -> TokenPositions:
    """All positions of [batch, seq_len] token ids that have a successor, row by row.

    Args:
        input_ids: The token ids.
        labels: Like them, -100 where a token does not count as a successor; None where all do.
    """
    counts = (input_ids if labels is None else labels.to(input_ids.device))[:, 1:] != IGNORED
    rows, columns = counts.nonzero(as_tuple=True)
    return TokenPositions(rows, columns, input_ids[:, 1:][counts])


@torch.no_grad()
def predict(lm: PreTrainedModel, input_ids: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
    """How probable the expected tokens are.

    Args:
        lm: Any causal language model; none of its attention may look ahead.
        input_ids: [batch, seq_len] token ids on the model's device; padding only on the right.
        positions: At least one.

    Returns:
        The natural logarithms of the probabilities, fp32 [count], and whether each token is the most
        probable one, bool [count]; both on the model's device.
    """
    scores = []
    with _head_alone(lm, input_ids) as logits_at:
        parts = (x.split(_SLICE_TOKENS) for x in (positions.rows, positions.columns, positions.targets))
        for rows, columns, targets in zip(*parts, strict=True):
            logits = logits_at(rows, columns)
            log_probs = -F.cross_entropy(logits.float(), targets, reduction="none")
            scores.append((log_probs, logits.argmax(-1) == targets))
    return torch.cat([x for x, _ in scores]), torch.cat([x for _, x in scores])


@dataclass
class _HeldBody:
    """Stands in for the forward of a model's body: the first call computes, each hands out some positions."""

    forward: Any
    output: Any = None
    wanted: tuple[Tensor, ...] = field(default_factory=tuple)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.output is None:
            self.output = self.forward(*args, **kwargs)
        hidden = self.output[0][self.wanted][None]
        if isinstance(self.output, tuple):
            return (hidden, *self.output[1:])
        first = next(iter(self.output))
        return type(self.output)(**(dict(self.output) | {first: hidden}))


@contextmanager
def _head_alone(lm: PreTrainedModel, input_ids: Tensor) -> Iterator[Any]:
    """A function from rows [count] and columns [count] to logits [count, vocabulary]."""
    body = _body(lm)
    held = _HeldBody(body.forward)

    def logits_at(*wanted: Tensor) -> Tensor:
        held.wanted = wanted
        logits: Tensor = lm(input_ids=input_ids, use_cache=False).logits
        # A model without a body of its own gives everything, each time.
        return logits[wanted] if held.output is None else logits[0]

    with nullcontext() if body is lm else patch.object(body, "forward", held):
        yield logits_at


def _body(lm: PreTrainedModel) -> nn.Module:
    # The outermost part is not always the one that is called: OPT's head reads its decoder.
    decoder: nn.Module = lm.get_decoder()
    if decoder is not lm:
        return decoder
    return next((child for child in lm.children() if isinstance(child, PreTrainedModel)), lm)
