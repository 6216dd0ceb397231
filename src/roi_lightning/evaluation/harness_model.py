"""The harness' own Hugging Face model, with a scorer that never holds all logits, and progress.

Imported by `harness` only where a harness task runs: lm-evaluation-harness is an optional extra.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.evaluation.scoring import TokenPositions, predict
from roi_lightning.models.config import check_embedded
from roi_lightning.utils.progress import progress

Request = tuple[Any, list[int], list[int]]


@dataclass(frozen=True)
class _Input:
    """A request as the model reads it: what goes in, and which continuation is expected at its end."""

    number: int
    tokens: tuple[int, ...]
    continuation: list[int]


class SlicedHFLM(HFLM):  # type: ignore[misc]
    """Tokenises, truncates, rolls and writes like its parent; scores in slices, in fp32, padded on the right.

    Args:
        lm: The model on its device.
        tokenizer: Its tokenizer; it may be given a padding token.
        max_length: Tokens the model reads at once; None for what its configuration says.
        batch_size: Sequences per forward pass.
        description: For the progress report.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        batch_size: int,
        description: str,
    ) -> None:
        super().__init__(
            pretrained=lm, backend="causal", tokenizer=tokenizer, max_length=max_length, batch_size=batch_size
        )
        self._sequences, self._description = batch_size, description

    @override
    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = super().tok_encode(string, *args, **kwargs)
        check_embedded(ids, self.tokenizer, self.model.config)
        return ids

    @override
    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        # The parent would cut documents into calls of its batch size; one call for all can be sorted.
        self.batch_size_per_gpu = sys.maxsize
        scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        self.batch_size_per_gpu = self._sequences
        return scores

    @override
    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[tuple[float, bool]]:
        inputs = [self._prepare(number, request) for number, request in enumerate(requests)]
        by_tokens: dict[tuple[int, ...], list[_Input]] = {}
        # The longest first: memory runs out at once or never, and neighbours pad each other little.
        for one in sorted(inputs, key=lambda one: (-len(one.tokens), one.tokens)):
            by_tokens.setdefault(one.tokens, []).append(one)
        groups = list(by_tokens.values())
        batches = [groups[i : i + self._sequences] for i in range(0, len(groups), self._sequences)]
        results: dict[int, tuple[float, bool]] = {}
        for batch in progress(batches, self._description):
            results |= self._score(batch)
        return [results[number] for number in range(len(requests))]

    def _prepare(self, number: int, request: Request) -> _Input:
        _, context, continuation = request
        if not context or not continuation or len(continuation) > self.max_length:
            raise UserError(
                f"a question has {len(context)} tokens of context and {len(continuation)} of answer, which the "
                f"model, reading at most {self.max_length}, can't score; leave this task out"
            )
        tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
        return _Input(number, tuple(tokens), continuation)

    def _score(self, batch: Sequence[Sequence[_Input]]) -> dict[int, tuple[float, bool]]:
        length = max(len(group[0].tokens) for group in batch)
        rows = [[*group[0].tokens, *[0] * (length - len(group[0].tokens))] for group in batch]
        input_ids = torch.tensor(rows, device=self.device)
        flat = [(row, one) for row, group in enumerate(batch) for one in group]
        log_probs, greedy = predict(self.model, input_ids, _positions(flat, self.device))
        sizes = [len(one.continuation) for _, one in flat]
        answers = zip(flat, log_probs.cpu().split(sizes), greedy.cpu().split(sizes), strict=True)
        return {one.number: (float(lp.double().sum()), bool(hits.all())) for (_, one), lp, hits in answers}


def _positions(flat: Sequence[tuple[int, _Input]], device: torch.device) -> TokenPositions:
    triples = [
        (row, column, target)
        for row, one in flat
        for column, target in enumerate(one.continuation, len(one.tokens) - len(one.continuation))
    ]
    return TokenPositions(*torch.tensor(triples, device=device).unbind(1))
