"""The text that token perplexities are measured on."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from roi_lightning.data.corpora import Corpus, load_documents, read_rows
from roi_lightning.errors import UserError

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
        return _wikitext()
    suffix = file.with_suffix("").suffix if file.suffix in _COMPRESSED else file.suffix
    if suffix in _DOCUMENT_FILES:
        return _documents(file)
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {str(file)!r} can't be read as UTF-8 text ({error}); convert it") from error


def _documents(file: Path) -> str:
    rows = read_rows(load_documents(Corpus(str(file), streaming=True)), f"--text {str(file)!r}")
    return "\n\n".join(row["text"] for row in rows if row["text"])


def _wikitext() -> str:
    try:
        rows = load_documents(WIKITEXT)
    except UserError as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), "no reason given")
        raise UserError(
            f"the WikiText-2 test text could not be fetched from the hub ({reason}); "
            "give a text file with --text"
        ) from error
    # The hub's rows are the lines of the original file, but for the blank ones, which held a space there.
    return "".join(row["text"] or " \n" for row in rows)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Token ids of the whole text, int64 [tokens], with the tokenizer's own special tokens around it."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns that no model reads so much at once
    try:
        return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
    finally:
        transformers_logging.set_verbosity(before)
