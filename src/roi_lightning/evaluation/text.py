"""The text that token perplexities are measured on."""

import io
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from roi_lightning.data.corpora import Corpus, load_documents, read_rows
from roi_lightning.errors import UserError
from roi_lightning.evaluation.windows import Cut

WIKITEXT: Final = Corpus("Salesforce/wikitext", subset="wikitext-2-raw-v1", split="test")
_DOCUMENT_FILES: Final = (".jsonl", ".json", ".parquet")
_COMPRESSED: Final = (".gz", ".zst", ".xz", ".bz2")


def read_text(file: Path | None) -> str:
    """The whole text as one string.

    Args:
        file: `.jsonl`, `.json` (also compressed) and `.parquet` hold documents in a column `text`, joined
            by a blank line; any other file is taken as it stands. None is the WikiText-2 raw test split
            from the hub, equal to its original file.

    Raises:
        UserError: If it can't be read, or the hub can't be reached.
    """
    if file is None:
        # The hub's rows are the lines of the original file, but for the blank ones, which held a space there.
        return "".join(row or " \n" for row in _wikitext())
    return "\n\n".join(filter(None, _documents(file))) if _holds_documents(file) else _plain(file)


def read_joined_rows(file: Path | None) -> str:
    """The rows of a text joined by a blank line, as Wanda and SparseGPT join those of WikiText-2.

    Args:
        file: As in `read_text`, but documents without text count too, and the lines of any other file are its rows:
            blank ones empty, others with their line feed, like the hub's rows of WikiText-2.

    Raises:
        UserError: If it can't be read, or the hub can't be reached.
    """
    if file is None:
        rows = _wikitext()
    elif _holds_documents(file):
        rows = _documents(file)
    else:
        rows = [line if line.strip() else "" for line in io.StringIO(_plain(file))]
    return "\n\n".join(rows)


def _holds_documents(file: Path) -> bool:
    suffix = file.with_suffix("").suffix if file.suffix in _COMPRESSED else file.suffix
    return suffix in _DOCUMENT_FILES


def _plain(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {str(file)!r} can't be read as UTF-8 text ({error}); convert it") from error


def _documents(file: Path) -> list[str]:
    rows = read_rows(load_documents(Corpus(str(file), streaming=True)), f"--text {str(file)!r}")
    return [row["text"] or "" for row in rows]


def _wikitext() -> list[str]:
    try:
        return [row["text"] for row in load_documents(WIKITEXT)]
    except UserError as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), "no reason given")
        raise UserError(
            f"the WikiText-2 test text could not be fetched from the hub ({reason}); "
            "give a text file with --text"
        ) from error


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, cut: Cut) -> Tensor:
    """Token ids of the whole text, int64 [tokens], with the tokenizer's own special tokens around it.

    A BOS that every window is to begin with is left out.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns that no model reads so much at once
    try:
        return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)[cut.bos is not None :]
    finally:
        transformers_logging.set_verbosity(before)
