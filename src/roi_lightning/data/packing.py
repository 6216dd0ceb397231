"""Turn documents into windows of exactly `seq_len` tokens, without leaking held-out text into training.

Documents are divided between training and held-out before any token is packed, so no window holds text of
both sides. Each step is a cached `datasets` operation under an explicit fingerprint, because the automatic
one changes whenever a tokenizer object is used.

Where only the answers of chats count, a token whose prediction does not count is stored as its complement ~id, a
negative number, up to the batch: so packing, caches, mixtures and positions in a stream know nothing of chats.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roi_lightning.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Side = Literal["all", "train", "val"]
Tokens = NDArray[np.int32]
DOCUMENTS_AT_ONCE = 64
IGNORED: Final = -100


class ChatTokens(Protocol):
    """What turns documents that are chats into tokens, separators included (`ChatTokenizer`)."""

    @property
    def answers_only(self) -> bool:
        """Whether only tokens of the assistant's messages count as predicted."""

    @property
    def identity(self) -> str:
        """Digest of what it does beside what the tokenizer does with text."""

    def __call__(self, documents: Sequence[str]) -> list[Tokens]:
        """Token ids of each, int32; ~id where the prediction of the token does not count."""


def counted_windows(windows: Tokens) -> Tokens:
    """The windows, of [windows, seq_len], in which the prediction of any token counts; the first is not predicted."""
    return windows[(windows[:, 1:] >= 0).any(1)]


def as_batch(marked: Tensor) -> dict[str, Tensor]:
    """A batch of windows, int64 [batch, seq_len], for the model.

    Returns:
        `input_ids`, and where some tokens don't count `labels`, the same with -100 in their place.
    """
    uncounted = marked < 0
    if not uncounted.any():
        return {"input_ids": marked}
    return {"input_ids": marked.where(~uncounted, ~marked), "labels": marked.masked_fill(uncounted, IGNORED)}


def belongs(text: str | None, side: Side, held_out_fraction: float) -> bool:
    """Whether a document has text and is on `side`; copies of a document are always on the same side.

    Args:
        text: The document, None where a table has a gap.
        side: `val` for the held-out documents, `train` for the others, `all` for no split.
        held_out_fraction: Expected fraction of documents on the held-out side, between 0 and 1.
    """
    if text is None or not (stripped := text.strip()):
        return False
    if side == "all":
        return True
    digest = hashlib.sha256(stripped.encode("utf-8", "surrogatepass")).digest()
    held_out = int.from_bytes(digest[:8]) < held_out_fraction * 2**64
    return held_out == (side == "val")


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Token ids of each text, int32, without special tokens."""
    # verbose=False: documents longer than the model's context are expected, they are cut afterwards
    ids = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [np.asarray(row, dtype=np.int32) for row in ids["input_ids"]]


def find_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that a tokenizer puts before every text; None where it puts none, whatever its `bos_token` is.

    A model that has always seen it there is lost without it: Gemma's perplexity is five times as high.
    """
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"][0] for special in (False, True))
    return None if full == plain else int(full)


class Packer:
    """Joins documents with `separator` between them and cuts the stream into exact windows.

    Tokens that do not fill a window are carried to the next call, so one pass drops fewer than
    `seq_len` tokens, at its end.

    Args:
        seq_len: Window length in tokens, BOS included.
        separator: Token id put between documents, None for nothing.
        bos: Token id that every window begins with, None for text alone (`find_bos`).
        carry: Text left of earlier documents, to resume where another packer stopped; None for none.
    """

    def __init__(
        self, seq_len: int, separator: int | None, bos: int | None = None, carry: Tokens | None = None
    ) -> None:
        self._between, self._bos = (
            np.asarray([] if token is None else [token], dtype=np.int32) for token in (separator, bos)
        )
        self._text_length = seq_len - len(self._bos)
        self.carry = carry

    def __call__(self, documents: Iterable[Sequence[int] | Tokens]) -> Tokens:
        """Add documents; return the windows they complete, int32 `[windows, seq_len]`."""
        parts = [] if self.carry is None else [self.carry]
        for ids in documents:
            parts += [self._between] if parts else []
            parts.append(np.asarray(ids, dtype=np.int32))
        stream = np.concatenate([self._between[:0], *parts])
        count = len(stream) // self._text_length
        text, rest = np.split(stream, [count * self._text_length])
        self.carry = rest.copy() if parts else None
        return np.hstack([np.tile(self._bos, (count, 1)), text.reshape(count, self._text_length)])


def select_side(documents: "Dataset", side: Side, held_out_fraction: float) -> "Dataset":
    """Keep the documents of one side, dropping those without text (see `belongs`).

    Raises:
        UserError: If a document is no UTF-8, which the JSON reader does not ask.
    """
    try:
        return documents.filter(
            lambda texts: [belongs(text, side, held_out_fraction) for text in texts],
            batched=True,
            input_columns="text",
            new_fingerprint=_fingerprint(documents, "side", side, held_out_fraction),
            desc="Splitting documents",
        )
    except UnicodeDecodeError as error:
        raise UserError(f"a document can't be read ({error}); convert the corpus to UTF-8") from error


def tokenize_documents(
    documents: "Dataset", tokenizer: PreTrainedTokenizerBase, chats: ChatTokens | None = None
) -> "Dataset":
    """Replace column `text` by `input_ids` (int32), one row per document, cached per tokenizer and chat template."""
    kind = [] if chats is None else [chats.identity]
    fingerprint = _fingerprint(documents, "tokens", identity(tokenizer), *kind)
    convert = chats or (lambda texts: tokenize(texts, tokenizer))
    return _map(documents, convert, -1, fingerprint, "Tokenizing")


def pack_documents(
    tokens: "Dataset", seq_len: int, separator: int | None, bos: int | None = None
) -> "Dataset":
    """Pack tokenised documents; guarantees windows of exactly `seq_len` tokens.

    Args:
        tokens: Rows of `input_ids`, one per document.
        seq_len: Window length in tokens, BOS included.
        separator: Token id put between documents.
        bos: Token id that every window begins with, None for text alone.

    Returns:
        Column `input_ids`, int32, `seq_len` each. Only the last, incomplete window of the dataset is
        dropped, which is fewer than `seq_len` tokens, and windows in which no token counts.
    """
    packer = Packer(seq_len, separator, bos)
    fingerprint = _fingerprint(tokens, "windows", seq_len, separator, *([] if bos is None else [bos]))
    return _map(
        tokens, lambda ids: list(counted_windows(packer(ids))), seq_len, fingerprint, "Packing windows"
    )


def _map(
    rows: "Dataset", convert: Callable[[Any], list[Tokens]], length: int, fingerprint: str, title: str
) -> "Dataset":
    """Turn the single column of `rows` into `input_ids` of `length` tokens each (-1: any)."""
    from datasets import Dataset, Features, List, Value

    features = Features({"input_ids": List(Value("int32"), length=length)})
    if not len(rows):  # map would hand an empty dataset back with its old column
        return Dataset.from_dict({"input_ids": []}, features)
    return rows.map(
        lambda batch: {"input_ids": convert(batch)},
        batched=True,
        batch_size=DOCUMENTS_AT_ONCE,
        input_columns=rows.column_names[0],
        remove_columns=rows.column_names,
        features=features,
        new_fingerprint=fingerprint,
        desc=title,
    )


def pack_side(
    documents: "Dataset",
    side: Side,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    name: str,
    chats: ChatTokens | None = None,
) -> "Dataset":
    """Tokenise and pack selected documents of corpus `name`, which are chats if that is given.

    Raises:
        UserError: If they do not fill one window; the `val` side may be that small.
    """
    if side != "val" and not len(documents):
        left = " left for training" if side == "train" else ""
        raise UserError(f"corpus {name!r} has no documents with text{left}; give more text")
    tokens, bos = tokenize_documents(documents, tokenizer, chats), find_bos(tokenizer)
    windows = pack_documents(tokens, seq_len, None if chats else tokenizer.eos_token_id, bos)
    if side != "val" and not len(windows):
        needed, found = seq_len - (bos is not None), sum(map(len, tokens["input_ids"]))
        if found >= needed:
            raise UserError(no_answers(name))
        length = f"has only {found} tokens, one window needs {needed}"
        raise UserError(f"corpus {name!r} {length}; give more text or lower data.seq_len")
    return windows


def no_answers(name: str) -> str:
    """What is wrong with a corpus of windows none of which holds a token that counts."""
    return f"no chat of corpus {name!r} has an answer, a message by the assistant; set loss_on: all"


def _fingerprint(parent: "Dataset", *parts: Any) -> str:
    """Name of a derived cache; change the leading number when these functions change their result."""
    described = json.dumps([1, parent._fingerprint, *parts])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of what a tokenizer does, unaffected by its having been used."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        described: Any = [type(tokenizer).__name__, tokenizer.name_or_path, tokenizer.get_vocab()]
    else:
        described = json.loads(backend.to_str())
        described.update(truncation=None, padding=None)
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
