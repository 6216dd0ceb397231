"""Where calibration text comes from: Python's own documentation, local files or the Hugging Face hub.

Every source ends as a `datasets` object with the single column `text`, whatever it was read from; a chat stands there
as a `chat_document`.
"""

import glob
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from roi_lightning.data.chats import chat_document
from roi_lightning.data.files import (
    OPENERS,
    Piece,
    cut_lines,
    json_documents,
    json_rows,
    python_documents,
    text_passages,
)
from roi_lightning.data.samples import SampleSettings
from roi_lightning.errors import UserError, reason

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Generate = Callable[..., Iterator[Mapping[str, str | None]]]
LossOn = Literal["all", "answers"]
PYTHON_DOCS = "python-docs"
SELF = "self"
_OF_SAMPLES = tuple(field.name for field in fields(SampleSettings))
_OF_SELF = {"source", "weight", "loss_on", *_OF_SAMPLES}
FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Corpus:
    """One source of calibration text.

    Attributes:
        source: `python-docs`, a local path or glob (.txt, .jsonl, .json, .parquet; all but parquet also
            compressed as .gz, .zst, .xz or .bz2), a hub dataset id such as `owner/name`, or `self` for documents that
            the dense model itself writes.
        weight: Fraction of the training windows drawn from here, relative to the other corpora's weights.
        subset: Configuration name of a hub dataset.
        split: Split of a hub dataset; local files have only `train`.
        text_field: Column that holds the text.
        streaming: Read while training instead of preparing a cache first.
        revision: Commit, tag or branch of a hub dataset.
        messages_field: Column that holds chats, lists of messages, in place of text.
        loss_on: Of chats, whether the loss and perplexities are those of all tokens or of the assistant's answers.
        tokens: Of `self`, how many tokens to sample; 300,000 if left out.
        max_tokens: Of `self`, the most tokens of a document; 1,024 if left out.
        seed: Of `self`, the seed of the draws; 0 if left out, whatever the run's is.
        start: Of `self`, the token that a document follows, if that is not the BOS or EOS of the tokenizer.
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
    tokens: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    start: str | None = None

    @property
    def samples(self) -> SampleSettings:
        """What to sample, of `self`.

        Raises:
            UserError: For numbers out of range.
        """
        given = {name: getattr(self, name) for name in _OF_SAMPLES}
        return SampleSettings(**{name: value for name, value in given.items() if value is not None})

    @property
    def title(self) -> str:
        """The source as provenance names it."""
        if self.source != SELF:
            return self.source
        return f"{SELF} ({self.samples.tokens} tokens of seed {self.samples.seed})"

    @property
    def field(self) -> str:
        """The column to read."""
        return self.messages_field or self.text_field


def as_corpora(value: Sequence[Corpus | str] | str) -> list[Corpus]:
    """Convert every accepted form of corpora to a list.

    Raises:
        UserError: If the list is empty, a weight is not positive, or chats are not described as such.
    """
    items = [value] if isinstance(value, str | Corpus) else list(value)
    corpora = [Corpus(item) if isinstance(item, str) else item for item in items]
    if not corpora:
        raise UserError(f"data.corpora is empty; name at least one source, for example {PYTHON_DOCS}")
    for corpus in corpora:
        _check_fields(corpus)
        if not 0 < corpus.weight < float("inf"):
            raise UserError(f"weight {corpus.weight} of corpus {corpus.source!r} must be a positive number")
        if corpus.loss_on not in get_args(LossOn):
            raise UserError(
                f"loss_on {corpus.loss_on!r} of corpus {corpus.source!r} is unknown; set it to all or answers"
            )
        if corpus.messages_field is not None and corpus.text_field != "text":
            raise UserError(
                f"corpus {corpus.source!r} has text_field {corpus.text_field!r} and messages_field "
                f"{corpus.messages_field!r}; leave one out"
            )
        if corpus.loss_on == "answers" and corpus.messages_field is None:
            raise UserError(
                f"loss_on: answers of corpus {corpus.source!r} is for chats; name their column with messages_field"
            )
    return corpora


def _check_fields(corpus: Corpus) -> None:
    """Refuse fields that mean nothing to a source."""
    own = (
        _OF_SELF if corpus.source == SELF else {each.name for each in fields(Corpus)}.difference(_OF_SAMPLES)
    )
    for each in fields(Corpus):
        value = getattr(corpus, each.name)
        if each.name not in own and value != each.default:
            raise UserError(
                f"{each.name} {value!r} means nothing to corpus {corpus.source!r}; leave it out"
                + (" or name another source" if corpus.source == SELF else f", or set source: {SELF}")
            )
    _ = corpus.samples


def parse_corpus(text: str) -> Corpus:
    """A corpus as a command line spells it: a source, or a mapping with the fields of Corpus in braces.

    Raises:
        UserError: If the mapping can't be read or has a field that Corpus lacks.
    """
    if not text.startswith("{"):
        return Corpus(text)
    try:
        return Corpus(**yaml.safe_load(text))
    except (yaml.YAMLError, TypeError) as error:
        raise UserError(
            f"corpus {text!r} is no mapping with the fields of Corpus ({reason(error)}); name its source"
        ) from error


def load_documents(corpus: Corpus, cache_dir: str | None = None) -> "Dataset | IterableDataset":
    """Open a corpus as a dataset with exactly one string column, `text`; of chats, their `chat_document`.

    Args:
        corpus: What to read.
        cache_dir: Folder for prepared data; None is the `datasets` library's own.

    Raises:
        UserError: If nothing matches, the source cannot be read, or it lacks the column; for `self`, which needs a
            model.
    """
    if corpus.source == SELF:
        raise UserError(
            "corpus 'self' is sampled from the model that is pruned, and there is none here; write it to a file with "
            "`roi-lightning sample LM --out samples.jsonl` and name that"
        )
    if corpus.source == PYTHON_DOCS:
        _check_no_chats(corpus)
        arguments: dict[str, Any] = {"library": sysconfig.get_path("stdlib"), "version": sys.version}
        return _from_generator(python_documents, arguments, corpus, cache_dir)
    paths = _local_files(corpus.source)
    if not paths:
        return _load_hub(corpus, cache_dir)
    kind = _format(paths)
    if kind == "text":
        _check_no_chats(corpus)
        stamps = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
        arguments = {"files": [str(path.resolve()) for path in paths], "stamps": stamps}
        return _from_generator(text_passages, arguments, corpus, cache_dir)
    if corpus.streaming and all(path.suffix == ".jsonl" for path in paths):
        return _stream_lines(paths, corpus, cache_dir)
    options = {"data_files": [str(path) for path in paths], "split": "train"}
    return _load(corpus, cache_dir, "check the file", kind, **options)


def describe(corpus: Corpus) -> dict[str, Any]:
    """What identifies a corpus, as plain values; of local files their names and sizes count, of `self` settings."""
    paths = [] if corpus.source in (PYTHON_DOCS, SELF) else _local_files(corpus.source)
    sizes = json.dumps([[path.name, path.stat().st_size] for path in paths])
    settings = asdict(corpus)
    if corpus.messages_field is None:  # what identified a text before there were chats identifies it still
        del settings["messages_field"], settings["loss_on"]
    for name in _OF_SAMPLES:  # likewise
        del settings[name]
    if corpus.source == SELF:
        settings |= asdict(corpus.samples)
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


def _format(paths: Sequence[Path]) -> str:
    formats = set()
    for path in paths:
        compressed = path.suffix in OPENERS
        suffix = path.with_suffix("").suffix if compressed else path.suffix
        if suffix not in FORMATS or (compressed and suffix == ".parquet"):
            known = f"{', '.join(FORMATS)} (all but .parquet also with {', '.join(OPENERS)})"
            raise UserError(f"cannot read {str(path)!r} as a corpus; use one of {known}")
        formats.add(FORMATS[suffix])
    if len(formats) > 1:
        raise UserError(f"corpus {str(paths[0])!r} and others mix formats; name one corpus per format")
    return formats.pop()


def _stream_lines(paths: Sequence[Path], corpus: Corpus, cache_dir: str | None) -> "IterableDataset":
    """JSON lines in pieces, so that a stream resumes in the middle of a file without reading what is before."""
    pieces = cut_lines(paths)
    first = next(chain.from_iterable(map(json_rows, pieces)), None)
    if first is None:
        raise UserError(f"corpus {corpus.source!r} holds no text; check the file")
    if corpus.field not in first:
        raise _no_column(corpus, first)
    arguments = {"pieces": pieces, "field": corpus.field}
    read = json_documents if corpus.messages_field is None else _json_chats
    return _from_generator(read, arguments, corpus, cache_dir)


def _json_chats(pieces: Sequence[Piece], field: str) -> Iterator[dict[str, str | None]]:
    for piece in pieces:
        for row in json_rows(piece):
            yield {"text": chat_document(row.get(field), piece[0])}


def _check_no_chats(corpus: Corpus) -> None:
    if corpus.messages_field is not None:
        raise UserError(
            f"corpus {corpus.source!r} is text without columns and holds no chats; leave out messages_field, or name "
            "a .jsonl, .json or .parquet file or a hub id"
        )


def _no_column(corpus: Corpus, columns: Iterable[str]) -> UserError:
    option = "text_field" if corpus.messages_field is None else "messages_field"
    return UserError(
        f"{corpus.source!r} has no column {corpus.field!r}; set {option} to one of: {', '.join(columns)}"
    )


def _load_hub(corpus: Corpus, cache_dir: str | None) -> "Dataset | IterableDataset":
    if corpus.source.count("/") != 1:
        raise UserError(f"unknown corpus {corpus.source!r}; use {PYTHON_DOCS}, a file or a hub id owner/name")
    options = {"name": corpus.subset, "split": corpus.split, "revision": corpus.revision}
    remedy = "check the id, subset, split, network and your login, or name a local file"
    return _load(corpus, cache_dir, remedy, corpus.source, **options)


def _load(
    corpus: Corpus, cache_dir: str | None, remedy: str, path: str, **options: object
) -> "Dataset | IterableDataset":
    import datasets

    try:
        with uncounted() if path in FORMATS.values() else nullcontext():
            loaded = datasets.load_dataset(path, cache_dir=cache_dir, streaming=corpus.streaming, **options)
        if loaded.features is None:
            loaded = loaded._resolve_features()
    except Exception as error:
        raise UserError(f"cannot load corpus {corpus.source!r} ({reason(error)}); {remedy}") from error
    return _only_text(loaded, corpus)


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


def _only_text(loaded: Any, corpus: Corpus) -> "Dataset | IterableDataset":
    import datasets

    field = corpus.field
    if field not in loaded.features:
        raise _no_column(corpus, loaded.features)
    if corpus.messages_field is not None:
        features = datasets.Features({"text": datasets.Value("large_string")})
        convert = partial(_chat_row, field=field, source=corpus.source)
        title = {} if corpus.streaming else {"desc": "Reading chats"}
        return loaded.map(convert, remove_columns=list(loaded.features), features=features, **title)
    if "string" not in str(getattr(loaded.features[field], "dtype", "")):
        raise UserError(f"column {field!r} of {corpus.source!r} is not text; choose another text_field")
    chosen = loaded.select_columns([field])
    return chosen if field == "text" else chosen.rename_column(field, "text")


def _chat_row(row: Mapping[str, object], field: str, source: str) -> dict[str, str | None]:
    return {"text": chat_document(row[field], source)}


def _from_generator(
    generate: Generate, arguments: dict[str, Any], corpus: Corpus, cache_dir: str | None
) -> "Dataset | IterableDataset":
    import datasets

    features = datasets.Features({"text": datasets.Value("large_string")})
    if corpus.streaming:
        return datasets.IterableDataset.from_generator(generate, features, gen_kwargs=arguments)
    try:
        return datasets.Dataset.from_generator(generate, features, cache_dir, gen_kwargs=arguments)
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error
        raise UserError(f"cannot read corpus {corpus.source!r} ({cause}); check the file") from error
    except ValueError as error:  # raised by datasets for a generator that yields nothing
        raise UserError(f"corpus {corpus.source!r} holds no text; check the file") from error
