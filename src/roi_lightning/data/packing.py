"""Turn documents into windows of exactly `seq_len` tokens, without leaking held-out text into training.

Documents are divided between training and held-out before any token is packed, so no window holds text of
both sides. Each step is a cached `datasets` operation under an explicit fingerprint, because the automatic
one changes whenever a tokenizer object is used.

Where only the answers of chats count, a token whose prediction does not count is stored as its complement ~id, a
negative number, up to the batch: so packing, caches, mixtures and positions in a stream know nothing of chats.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from roi_lightning.errors import UserError
from roi_lightning.models.config import check_embedded

if TYPE_CHECKING:
    from datasets import Dataset

Side = Literal["all", "train", "val"]
Tokens = NDArray[np.int32]
DOCUMENTS_AT_ONCE = 64
_ASKED: Final = 1000
IGNORED: Final = -100


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


def tokens_of(batch: Any) -> tuple[Tensor, Tensor | None]:
    """The token ids of a batch, [batch, positions], and its labels, if any; a tensor is the ids alone."""
    ids = batch[0] if isinstance(batch, list | tuple) and len(batch) == 1 else batch
    named = ids if isinstance(ids, Mapping) else {"input_ids": ids}
    tokens = named.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise UserError(f"a batch is a {type(batch).__name__}; give token ids [batch, positions]")
    return tokens, named.get("labels")


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


@dataclass(frozen=True)
class TextTokenizer:
    """Turns the documents of a corpus into tokens; `ChatTokenizer` does it for chats.

    Attributes:
        tokenizer: The tokenizer.
        source: The corpus, for errors.
        model: The configuration of the model that will read them, if it is known.
    """

    tokenizer: PreTrainedTokenizerBase
    source: str
    model: PreTrainedConfig | None = None

    @property
    def separator(self) -> int | None:
        """The token put between documents; None where documents bring their own."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @cached_property
    def bos(self) -> int | None:
        """The token that every window begins with, see `find_bos`."""
        return find_bos(self.tokenizer)

    @property
    def identity(self) -> str:
        """Digest of what the tokens depend on, beside the documents."""
        return identity(self.tokenizer)

    def __call__(self, documents: Sequence[str]) -> list[Tokens]:
        """Token ids of each document, int32; ~id where the prediction of a token does not count."""
        return tokenize(documents, self.tokenizer)


def find_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that a tokenizer puts before every text; None where it puts none, whatever its `bos_token` is.

    A model that has always seen it there is lost without it: Gemma's perplexity is five times as high.
    """
    # A text of its own tokens: no letter is in every vocabulary.
    text = tokenizer.decode(
        sorted({*range(min(len(tokenizer), _ASKED))} - {*tokenizer.get_added_vocab().values()})
    )
    plain, full = (
        tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"] for special in (False, True)
    )
    return None if full[: len(plain)] == plain else int(full[0])


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
    """Keep the documents of one side, dropping those without text (see `belongs`)."""
    return documents.filter(
        lambda texts: [belongs(text, side, held_out_fraction) for text in texts],
        batched=True,
        input_columns="text",
        new_fingerprint=_fingerprint(documents, "side", side, held_out_fraction),
        desc="Splitting documents",
    )


def _map(
    rows: "Dataset", convert: Callable[[Any], list[Tokens]], length: int, parts: Sequence[Any], title: str
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
        new_fingerprint=_fingerprint(rows, *parts),
        desc=title,
    )


def pack_side(documents: "Dataset", side: Side, convert: TextTokenizer, seq_len: int) -> "Dataset":
    """Tokenise and pack the selected documents of a side.

    Args:
        documents: Column `text`.
        side: Which they are.
        convert: What makes tokens of them.
        seq_len: Window length in tokens, BOS included.

    Returns:
        Column `input_ids`, int32, exactly `seq_len` each. Only the last, incomplete window is dropped, which is fewer
        than `seq_len` tokens, and windows in which no token counts.

    Raises:
        UserError: If they do not fill one window, which the `val` side need not, or hold what the model can't read.
    """
    name, separator, bos = convert.source, convert.separator, convert.bos
    packer = Packer(seq_len, separator, bos)
    tokens = _map(documents, convert, -1, ["tokens", convert.identity], "Tokenizing")
    parts = ["windows", seq_len, separator, bos]
    windows = _map(tokens, lambda ids: list(counted_windows(packer(ids))), seq_len, parts, "Packing windows")
    for chunk in windows.data.column("input_ids").chunks:
        check_embedded(chunk.flatten().to_numpy(), convert.tokenizer, convert.model)
    if side == "val" or len(windows):
        return windows
    if not len(documents):
        left = " left for training" if side == "train" else ""
        raise UserError(f"corpus {name!r} has no documents with text{left}; give more text")
    length, needed = sum(map(len, tokens["input_ids"])), seq_len - (bos is not None)
    if length >= needed:
        raise UserError(no_answers(name))
    raise UserError(
        f"corpus {name!r} has only {length} tokens, one window needs {needed}; give more text or lower data.seq_len"
    )


def no_answers(name: str) -> str:
    """What is wrong with a corpus of windows none of which holds a token that counts."""
    return f"no chat of corpus {name!r} has an answer, a message by the assistant; set loss_on: all"


def _fingerprint(parent: "Dataset", *parts: Any) -> str:
    """Name of a derived cache; change the leading number when these functions change their result."""
    described = json.dumps([2, parent._fingerprint, *parts])
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
