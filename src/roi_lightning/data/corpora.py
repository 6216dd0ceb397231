"""Where calibration text comes from: Python's own documentation, local files or the Hugging Face hub.

Every source ends as a `datasets` object with the single column `text`, whatever it was read from; a chat stands there
as a `chat_document`.
"""

import glob
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from jsonargparse import ArgumentError, ArgumentParser

from roi_lightning.data.chats import chat_document
from roi_lightning.data.files import (
    Piece,
    cut_file,
    file_documents,
    python_documents,
    readable,
    require_column,
    text_document,
)
from roi_lightning.errors import UserError, brief, user_path

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

Generate = Callable[..., Iterator[Mapping[str, str | None]]]
LossOn = Literal["all", "answers"]
PYTHON_DOCS = "python-docs"
_HUB_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w.-]{1,96}")
_OF_A_FILE = re.compile(r"^[./~]|[*?[]|\.(txt|jsonl?|parquet|gz|zst|xz|bz2)$", re.IGNORECASE)


@dataclass(frozen=True)
class Corpus:
    """One source of calibration text.

    Attributes:
        source: `python-docs`, a local path or glob, or a hub dataset id such as `owner/name`. Files hold plain text,
            JSON objects (one a line, or in a list) or Parquet, also compressed (gz, zst, xz, bz2).
        weight: Fraction of the training windows drawn from here, relative to the other corpora's weights.
        subset: Configuration name of a hub dataset.
        split: Split of a hub dataset; local files have only `train`.
        text_field: Column that holds the text.
        streaming: Read while training instead of preparing a cache first.
        revision: Commit, tag or branch of a hub dataset.
        messages_field: Column that holds chats, lists of messages, in place of text.
        loss_on: Which tokens of chats count in the loss and in perplexities: `all`, or the assistant's `answers`.
    """

    source: str
    weight: float = 1.0
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    streaming: bool = False
    revision: str | None = None
    messages_field: str | None = None
    loss_on: LossOn = "all"

    @property
    def field(self) -> str:
        """The column to read."""
        return self.messages_field or self.text_field

    @property
    def document(self) -> Callable[..., str | None]:
        """Makes a document of what stands in the column of a `source`; raises a UserError for what is none."""
        if self.messages_field is None:
            return partial(text_document, column=self.field)
        return chat_document


def as_corpora(value: Sequence[Corpus | str] | Corpus | str) -> list[Corpus]:
    """Convert every accepted form of corpora to a list.

    Raises:
        UserError: If the list is empty, a mapping can't be read, a weight is not positive, or chats are not described
            as such.
    """
    items = [value] if isinstance(value, str | Corpus) else list(value)
    corpora = [_parse(item) if isinstance(item, str) else item for item in items]
    if not corpora:
        raise UserError(f"data.corpora is empty; name at least one source, for example {PYTHON_DOCS}")
    for corpus in corpora:
        if not 0 < corpus.weight < float("inf"):
            raise UserError(f"weight {corpus.weight} of corpus {corpus.source!r} must be a positive number")
        if corpus.loss_on not in get_args(LossOn):
            raise UserError(
                f"loss_on {corpus.loss_on!r} of corpus {corpus.source!r} is unknown; set it to all or answers"
            )
        if corpus.loss_on == "answers" and corpus.messages_field is None:
            raise UserError(
                f"loss_on: answers of corpus {corpus.source!r} is for chats; name their column with messages_field"
            )
    return corpora


def _parse(text: str) -> Corpus:
    """A corpus as a command line spells it: a source, or a mapping with the fields of Corpus in braces."""
    if not text.startswith("{") or os.path.lexists(text):
        return Corpus(text)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--corpus", type=Corpus)
    try:
        made: Corpus = parser.instantiate_classes(parser.parse_args([f"--corpus={text}"])).corpus
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(f"corpus {text!r} is none: {brief(str(error))}; name its source") from error
    return made


def load_documents(corpus: Corpus, cache_dir: str | None = None) -> "Dataset | IterableDataset":
    """Open a corpus as a dataset with exactly one string column, `text`; of chats, their `chat_document`.

    Args:
        corpus: What to read.
        cache_dir: Folder for prepared data; None is the `datasets` library's own.

    Raises:
        UserError: If nothing matches, the source cannot be read, or it lacks the column.
    """
    import datasets

    pieces = find_pieces(corpus)
    remedy = f"{cache_remedy(cache_dir)}; of a hub id check subset, split, network and your login"
    features = datasets.Features({"text": datasets.Value("large_string")})
    arguments = {"pieces": pieces, "column": corpus.field, "convert": corpus.document}
    with readable(corpus.source, remedy):
        if not pieces and corpus.source != PYTHON_DOCS:
            return _of_the_hub(corpus, cache_dir, features)
        if not pieces:
            arguments = {"library": sysconfig.get_path("stdlib"), "version": sys.version}
        generate: Generate = file_documents if pieces else python_documents
        if corpus.streaming:
            return datasets.IterableDataset.from_generator(generate, features, gen_kwargs=arguments)
        return datasets.Dataset.from_generator(generate, features, cache_dir, gen_kwargs=arguments)


def cache_remedy(cache_dir: str | None) -> str:
    """What to do where prepared data can't be written."""
    from datasets.config import HF_DATASETS_CACHE

    folder = str(cache_dir or HF_DATASETS_CACHE)
    return f"check that {folder!r} can be written and has room, or set HF_HOME or cache_dir to another folder"


def find_pieces(corpus: Corpus) -> list[Piece]:
    """The local files of a corpus in pieces; none of a hub id or `python-docs`.

    Raises:
        UserError: If they can't be read, hold nothing, or lack the column.
    """
    paths = _local_files(corpus.source)
    if not paths and corpus.source != PYTHON_DOCS and not _HUB_ID.fullmatch(corpus.source):
        raise UserError(f"unknown corpus {corpus.source!r}; use {PYTHON_DOCS}, a file or a hub id owner/name")
    pieces = [piece for path in paths for piece in cut_file(path, corpus.field)]
    if paths and not pieces:
        raise UserError(f"corpus {corpus.source!r} holds no text; check the file")
    plain = {piece.kind == "text" for piece in pieces} or {corpus.source == PYTHON_DOCS}
    if True in plain and (False in plain or corpus.messages_field):
        raise UserError(
            f"corpus {corpus.source!r} holds plain text; name tables in a corpus of their own, and no messages_field"
        )
    return pieces


def describe(corpus: Corpus) -> dict[str, Any]:
    """What identifies a corpus, as plain values; of local files their names and sizes count."""
    paths = _local_files(corpus.source)
    sizes = json.dumps([[path.name, path.stat().st_size] for path in paths])
    of_chats = ("messages_field", "loss_on") if corpus.messages_field is None else ()
    settings = {name: value for name, value in asdict(corpus).items() if name not in of_chats}
    return settings | {"files": hashlib.sha256(sizes.encode()).hexdigest()}


def _local_files(source: str) -> list[Path]:
    """Files that `source` names, a file of that very name before others that match; empty for anything else."""
    if source == PYTHON_DOCS:
        return []
    pattern = str(user_path(source, "the source of a corpus"))
    exists = os.path.exists(pattern)  # noqa: PTH110 - Path's raises where a name is too long
    matches = [pattern] if exists else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if len(matches) == 1 and Path(matches[0]).is_dir():
        raise UserError(f"corpus {source!r} is a folder; name its files, for example {source}/*.jsonl")
    files = [Path(match) for match in matches if Path(match).is_file()]
    if not files and _OF_A_FILE.search(source):
        raise UserError(f"corpus {source!r}: no file matches; check the path")
    return files


def _of_the_hub(corpus: Corpus, cache_dir: str | None, features: "Features") -> "Dataset | IterableDataset":
    import datasets

    part = {"name": corpus.subset, "split": corpus.split, "revision": corpus.revision}
    how = {"cache_dir": cache_dir, "streaming": corpus.streaming}
    loaded: Any = datasets.load_dataset(corpus.source, **part, **how)
    if loaded.features is None:
        loaded = loaded._resolve_features()
    field = corpus.field
    require_column(field, list(loaded.features), corpus.source)
    if corpus.messages_field is not None:
        title = {} if corpus.streaming else {"desc": "Reading chats"}
        convert = partial(_document_row, field=field, document=corpus.document, source=corpus.source)
        return loaded.map(convert, remove_columns=list(loaded.features), features=features, **title)
    if "string" not in str(getattr(loaded.features[field], "dtype", "")):
        raise UserError(f"column {field!r} of {corpus.source!r} is not text; choose another text_field")
    chosen = loaded.select_columns([field])
    return chosen if field == "text" else chosen.rename_column(field, "text")


def _document_row(
    row: Mapping[str, object], field: str, document: Callable[..., str | None], source: str
) -> dict[str, str | None]:
    return {"text": document(row[field], source=source)}
