"""Where calibration text comes from: Python's own documentation, local files or the Hugging Face hub.

Every source ends as a `datasets` object with the single column `text`, whatever it was read from; a chat stands there
as a `chat_document`.
"""

import glob
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from jsonargparse import ArgumentError, ArgumentParser

from roi_lightning.data.chats import chat_document
from roi_lightning.data.files import (
    OPENERS,
    cut_lines,
    json_documents,
    json_rows,
    python_documents,
    text_document,
    text_passages,
)
from roi_lightning.errors import UserError, brief, reason

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Generate = Callable[..., Iterator[Mapping[str, str | None]]]
LossOn = Literal["all", "answers"]
PYTHON_DOCS = "python-docs"
FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Corpus:
    """One source of calibration text.

    Attributes:
        source: `python-docs`, a local path or glob (.txt, .jsonl, .json, .parquet; all but parquet also
            compressed as .gz, .zst, .xz or .bz2), or a hub dataset id such as `owner/name`.
        weight: Fraction of the training windows drawn from here, relative to the other corpora's weights.
        subset: Configuration name of a hub dataset.
        split: Split of a hub dataset; local files have only `train`.
        text_field: Column that holds the text.
        streaming: Read while training instead of preparing a cache first.
        revision: Commit, tag or branch of a hub dataset.
        messages_field: Column that holds chats, lists of messages, in place of text.
        loss_on: Of chats, whether the loss and perplexities are those of all tokens or of the assistant's answers.
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
    def document(self) -> Callable[[object], str | None]:
        """Makes a document of what stands in the column; raises a UserError for what is none."""
        if self.messages_field is None:
            return partial(text_document, column=self.field, source=self.source)
        return partial(chat_document, source=self.source)


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
    is_docs = corpus.source == PYTHON_DOCS
    paths = [] if is_docs else _local_files(corpus.source)
    kind = "text" if is_docs else _format(paths)
    if kind is None and corpus.source.count("/") != 1:
        raise UserError(f"unknown corpus {corpus.source!r}; use {PYTHON_DOCS}, a file or a hub id owner/name")
    if kind == "text" and corpus.messages_field is not None:
        raise UserError(
            f"corpus {corpus.source!r} is text without columns and holds no chats; leave out messages_field, or name "
            "a .jsonl, .json or .parquet file or a hub id"
        )
    with _readable(
        corpus, "check the file" if kind else "check the id, subset, split, network and your login"
    ):
        if is_docs:
            library = {"library": sysconfig.get_path("stdlib"), "version": sys.version}
            return _generated(python_documents, library, corpus, cache_dir)
        if kind == "text":
            stamps = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
            files = {"files": [str(path.resolve()) for path in paths], "stamps": stamps}
            return _generated(text_passages, files, corpus, cache_dir)
        if corpus.streaming and {path.suffix for path in paths} == {".jsonl"}:
            return _stream_lines(paths, corpus)
        return _loaded(kind, paths, corpus, cache_dir)


def describe(corpus: Corpus) -> dict[str, Any]:
    """What identifies a corpus, as plain values; of local files their names and sizes count."""
    paths = [] if corpus.source == PYTHON_DOCS else _local_files(corpus.source)
    sizes = json.dumps([[path.name, path.stat().st_size] for path in paths])
    of_chats = ("messages_field", "loss_on") if corpus.messages_field is None else ()
    settings = {name: value for name, value in asdict(corpus).items() if name not in of_chats}
    return settings | {"files": hashlib.sha256(sizes.encode()).hexdigest()}


def read_rows(rows: Iterable[dict[str, Any]], what: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a streamed corpus, whose damage further down shows only now, by any exception.

    Raises:
        UserError: Naming `what` is read.
    """
    try:
        yield from rows
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} can't be read to its end ({reason(error)}); check the file") from error


@contextmanager
def _readable(corpus: Corpus, remedy: str) -> Iterator[None]:
    """Name the corpus in whatever another library raises while it opens it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = reason(error.__cause__ or error)
        raise UserError(f"cannot load corpus {corpus.source!r} ({said}); {remedy}") from error


def _local_files(source: str) -> list[Path]:
    """Files that `source` names, empty for a hub id."""
    pattern = str(Path(source).expanduser())
    matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if len(matches) == 1 and Path(matches[0]).is_dir():
        raise UserError(f"corpus {source!r} is a folder; name its files, for example {source}/*.jsonl")
    files = [Path(match) for match in matches if Path(match).is_file()]
    looks_local = source.startswith((".", "/", "~")) or glob.has_magic(source)
    if not files and (looks_local or Path(source).suffix in {*FORMATS, *OPENERS}):
        raise UserError(f"corpus {source!r}: no file matches; check the path")
    return files


def _format(paths: Sequence[Path]) -> str | None:
    """What `datasets` calls the format of files; None if there are none."""
    suffixes = {path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix for path in paths}
    if unknown := suffixes - FORMATS.keys():
        known = f"{', '.join(FORMATS)} (all but .parquet also with {', '.join(OPENERS)})"
        raise UserError(f"cannot read {str(paths[0])!r} as a corpus ({min(unknown)}); use one of {known}")
    formats = {FORMATS[suffix] for suffix in suffixes}
    if len(formats) > 1:
        raise UserError(f"corpus {str(paths[0])!r} and others mix formats; name one corpus per format")
    return formats.pop() if formats else None


def _stream_lines(paths: Sequence[Path], corpus: Corpus) -> "IterableDataset":
    """JSON lines in pieces, so that a stream resumes in the middle of a file without reading what is before."""
    pieces = cut_lines(paths)
    _require_column(corpus, next(chain.from_iterable(map(json_rows, pieces)), {}))
    arguments = {"pieces": pieces, "column": corpus.field, "convert": corpus.document}
    return _generated(json_documents, arguments, corpus)


def _require_column(corpus: Corpus, columns: Iterable[str]) -> None:
    if corpus.field not in columns:
        option = "text_field" if corpus.messages_field is None else "messages_field"
        raise UserError(
            f"{corpus.source!r} has no column {corpus.field!r}; set {option} to one of: {', '.join(columns)}"
        )


def _loaded(
    kind: str | None, paths: Sequence[Path], corpus: Corpus, cache_dir: str | None
) -> "Dataset | IterableDataset":
    """The text column of local JSON or Parquet, or of a hub dataset where `kind` is None."""
    import datasets

    where = {"cache_dir": cache_dir, "streaming": corpus.streaming}
    if kind is None:
        hub = {"name": corpus.subset, "split": corpus.split, "revision": corpus.revision}
        loaded: Any = datasets.load_dataset(corpus.source, **where, **hub)
    else:
        with uncounted():
            loaded = datasets.load_dataset(
                kind, data_files=[str(path) for path in paths], split="train", **where
            )
    if loaded.features is None:
        loaded = loaded._resolve_features()
    field = corpus.field
    _require_column(corpus, loaded.features)
    if corpus.messages_field is not None:
        features = datasets.Features({"text": datasets.Value("large_string")})
        title = {} if corpus.streaming else {"desc": "Reading chats"}
        convert = partial(_document_row, field=field, document=corpus.document)
        return loaded.map(convert, remove_columns=list(loaded.features), features=features, **title)
    if "string" not in str(getattr(loaded.features[field], "dtype", "")):
        raise UserError(f"column {field!r} of {corpus.source!r} is not text; choose another text_field")
    chosen = loaded.select_columns([field])
    return chosen if field == "text" else chosen.rename_column(field, "text")


def _document_row(
    row: Mapping[str, object], field: str, document: Callable[[object], str | None]
) -> dict[str, str | None]:
    return {"text": document(row[field])}


@contextmanager
def uncounted() -> Iterator[None]:
    """Switch off the download counter of `datasets`, which uses the network even for local files."""
    import datasets

    before = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before


def _generated(
    generate: Generate, arguments: dict[str, Any], corpus: Corpus, cache_dir: str | None = None
) -> "Dataset | IterableDataset":
    import datasets

    features = datasets.Features({"text": datasets.Value("large_string")})
    if corpus.streaming:
        return datasets.IterableDataset.from_generator(generate, features, gen_kwargs=arguments)
    return datasets.Dataset.from_generator(generate, features, cache_dir, gen_kwargs=arguments)
