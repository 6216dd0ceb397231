"""Token perplexity: a text is cut into windows that do not overlap.

The first token of a window is context only. Where that is a BOS, every token of the text is predicted once.
"""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.chats import ChatTokenizer
from roi_lightning.data.corpora import Corpus, find_pieces, load_documents
from roi_lightning.data.files import readable
from roi_lightning.data.packing import no_answers
from roi_lightning.errors import UserError
from roi_lightning.evaluation.scoring import every_next_token, predict

WIKITEXT: Final = Corpus("Salesforce/wikitext", subset="wikitext-2-raw-v1", split="test")


class EvalText(NamedTuple):
    """A text in the two forms that token perplexities are measured on.

    Attributes:
        whole: The text as it stands; documents that hold any text joined by a blank line.
        rows: Its rows joined by a blank line, as Wanda and SparseGPT join those of WikiText-2: documents, empty ones
            too, or lines, blank ones empty and others with their line feed, like the hub's rows of WikiText-2.
    """

    whole: str
    rows: str


class EvalChats(NamedTuple):
    """Chats, one after the other.

    Attributes:
        corpus: Where they come from, and which of their tokens count.
        documents: As `chat_document` makes them.
    """

    corpus: Corpus
    documents: list[str]

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Token ids of all, int64 [tokens], ~id where a token does not count; a BOS of the template is left out.

        Raises:
            UserError: If the tokenizer's chat template does not do for them, or no token counts.
        """
        convert = ChatTokenizer(tokenizer, self.corpus.source, answers_only=self.corpus.loss_on == "answers")
        ids = torch.from_numpy(np.concatenate(convert(self.documents))).long()
        if not (ids >= 0).any():
            raise UserError(no_answers(self.corpus.source))
        return ids


def read_text(corpus: Corpus | None) -> EvalText | EvalChats:
    """Read a text, or chats, once.

    Args:
        corpus: Documents in the column that it names, chats, or a file of plain text, which is taken as it stands.
            None is the WikiText-2 raw test split from the hub, equal to its original file.

    Raises:
        UserError: If it can't be read, or the hub can't be reached.
    """
    if corpus is None:
        rows = [row["text"] for row in load_documents(WIKITEXT)]
        # The hub's rows are the lines of the original file, except the blank ones, which held a space there.
        return EvalText("".join(row or " \n" for row in rows), "\n\n".join(rows))
    with readable(corpus.source):
        rows = [row["text"] or "" for row in load_documents(replace(corpus, streaming=True))]
    texts = [row for row in rows if row]
    if not texts:
        raise UserError(f"--text {corpus.source!r} holds no text; check the file")
    if corpus.messages_field:
        return EvalChats(corpus, texts)
    pieces = find_pieces(corpus)
    if len(pieces) != 1 or pieces[0].kind != "text":
        return EvalText("\n\n".join(texts), "\n\n".join(rows))
    text = "".join(texts)
    return EvalText(text, "\n\n".join(line if line.strip() else "" for line in io.StringIO(text)))


@dataclass(frozen=True)
class Cut:
    """How a text becomes windows.

    Attributes:
        length: Tokens per window, BOS included; at least 2.
        keep_tail: Whether the shorter rest counts too, weighted by its tokens. Wanda and SparseGPT drop it.
        limit: The first so many windows, below 1 a fraction of them, rounded up; None for all.
        bos: Token id that every window begins with; None for text alone.
    """

    length: int
    keep_tail: bool = True
    limit: float | None = None
    bos: int | None = None

    @property
    def text_length(self) -> int:
        """Tokens of text per window."""
        return self.length - (self.bos is not None)

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
        """Token ids of a text, int64 [tokens], with the tokenizer's own special tokens around it.

        A BOS that every window begins with is left out.
        """
        ids = tokenizer(text, verbose=False)["input_ids"]  # it would warn that no model reads so much at once
        return torch.tensor(ids, dtype=torch.int64)[self.bos is not None :]

    def batches(self, ids: Tensor, size: int) -> list[Tensor]:
        """The windows of a text, int64 [tokens], as batches [up to `size`, length], the tail by itself.

        The text comes without a BOS where the windows have one.

        Raises:
            UserError: If there are too few tokens for a window.
        """
        # A token is predicted where another, or a BOS, is before it.
        least = 1 + (self.bos is None) if self.keep_tail else self.text_length
        windows = [window for window in ids.split(self.text_length) if len(window) >= least]
        if not windows:
            raise UserError(
                f"the text has {len(ids)} tokens and at least {least} are needed; give a longer --text"
            )
        limit = len(windows) if self.limit is None else self.limit
        windows = windows[: math.ceil(len(windows) * limit) if limit < 1 else int(limit)]
        full = [window for window in windows if len(window) == self.text_length]
        batches = [torch.stack(full[i : i + size]) for i in range(0, len(full), size)]
        batches += [tail[None] for tail in windows[len(full) :]]
        opening = [] if self.bos is None else [self.bos]
        return [torch.cat([batch.new_tensor([opening] * len(batch)), batch], 1) for batch in batches]


def token_perplexity(
    lm: PreTrainedModel, batches: Iterable[Tensor], labels: Iterable[Tensor | None] | None = None
) -> float:
    """Token perplexity: exp of the mean negative log-likelihood over all predicted tokens.

    Args:
        lm: The model, in whatever mode its layers are.
        batches: Token ids [batch, length] each, for instance from `Cut.batches`.
        labels: Of each batch, like it, -100 where a token does not count, of which some must; None where all do.

    Returns:
        The perplexity; infinite where the mean exceeds what exp can hold.
    """
    device = next(lm.parameters()).device
    total, count = 0.0, 0
    for batch, expected in zip(batches, repeat(None) if labels is None else labels, strict=False):
        input_ids = batch.to(device)
        log_probs, _ = predict(lm, input_ids, every_next_token(input_ids, expected))
        total -= float(log_probs.double().sum())
        count += len(log_probs)
    mean = total / count
    return math.inf if mean > 700 else math.exp(mean)
