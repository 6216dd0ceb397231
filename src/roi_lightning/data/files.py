"""Read documents: Python's own documentation, and files, whose content says what they are."""

import ast
import bz2
import codecs
import gzip
import importlib
import io
import json
import lzma
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TextIO, cast

from roi_lightning.errors import UserError, reason

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Kind = Literal["text", "lines", "list", "table"]
# How packed files begin, and what opens them.
_OPENERS: Final[dict[bytes, Any]] = {
    rb"\x1f\x8b": gzip.open,
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": zstd.open,
    rb"\xfd7zXZ\0": lzma.open,
    rb"BZh[1-9]": bz2.open,
}
_OBJECTS: Final = re.compile(r"""\s*(?:\{\s*["}]|(\[)\s*\{)""")  # JSON's, or a list of them
_NAME_OF_A_TABLE: Final = re.compile(r"(?i)\.(json\w*|ndjson|parquet|csv|tsv)(\.(gz|zst|xz|bz2))?$")
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
PASSAGE_CHARACTERS: Final = 10_000
_HEAD: Final = 1 << 16  # bytes
_PIECE: Final = 8 << 20  # bytes
_ROWS: Final = 256  # of a table at once
_OBJECTS_ASKED: Final = 64  # for their keys
_MIN_CHARACTERS: Final = 200  # of a module's docstrings; shorter ones are stubs
_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_documents(library: str, version: str) -> Iterator[dict[str, str]]:
    """Yield the language reference topic by topic, then the docstrings of each module under `library`.

    Modules are parsed and never imported. `version` only distinguishes caches of different Pythons.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        topics = {}
    files = sorted(Path(library).rglob("*.py"))
    modules = (file for file in files if not _NOT_LIBRARY.intersection(file.relative_to(library).parts))
    for text in chain((topics[name] for name in sorted(topics)), map(_docstrings, modules)):
        if len(text) >= _MIN_CHARACTERS:
            yield {"text": text}


def _docstrings(file: Path) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's modules
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def cut_passages(stream: TextIO) -> Iterator[str]:
    """Cut text at blank lines into passages of about 10,000 characters whose concatenation is the text.

    Text without blank lines is cut after about twice as many characters.
    """
    held: list[str] = []
    size = 0
    while piece := stream.readline(PASSAGE_CHARACTERS):
        held.append(piece)
        size += len(piece)
        if size >= PASSAGE_CHARACTERS * (1 if not piece.strip() else 2):
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


class Piece(NamedTuple):
    """What is read at once: a file, or the lines of one that start in some of its bytes.

    Attributes:
        path: The file.
        kind: Plain text, JSON objects (one a line, or in a list) or a Parquet table.
        start: First byte.
        end: The byte after the last one.
        stamp: Time of the last change, which no program can set, and size, by which caches notice one.
    """

    path: str
    kind: Kind
    start: int
    end: int
    stamp: tuple[int, int]


def cut_file(file: Path, column: str) -> list[Piece]:
    """Look at what a file holds, and cut it into pieces: lines into about 8 MiB, unless they are packed.

    A line belongs to the piece in which it starts. A blank file or an empty table has none.

    Raises:
        UserError: If it can't be read, holds nothing that is known, or is a table without the column.
    """
    from pyarrow.parquet import ParquetFile

    with readable(str(file)), _open(file) as stream:
        head, packed = stream.read(_HEAD), not isinstance(stream, io.BufferedReader)
        if len(head) < _HEAD and not head.strip():
            return []
        kind, stamp = _kind(file, head), (file.stat().st_ctime_ns, file.stat().st_size)
        count = 1 if packed or kind != "lines" else max(1, round(stamp[1] / _PIECE))
        edges = [*(stamp[1] * i // count for i in range(count)), sys.maxsize]
        pieces = [Piece(str(file.resolve()), kind, *edge, stamp) for edge in pairwise(edges)]
        stream.seek(0)
        if kind == "table":
            table = ParquetFile(stream)
            require_column(column, table.schema_arrow.names, str(file))
            return pieces if table.metadata.num_rows else []
        if kind != "text":
            keys = chain.from_iterable(islice(_objects(stream, pieces[0]), _OBJECTS_ASKED))
            require_column(column, list(dict.fromkeys(keys)), str(file))
    return pieces


def require_column(column: str, names: Sequence[str], source: str) -> None:
    """Refuse a table without a column.

    Raises:
        UserError: Naming those that it has.
    """
    if column not in names:
        raise UserError(
            f"{source!r} has no column {column!r}; set text_field, or messages_field for chats, to one of: "
            f"{', '.join(names)}"
        )


def file_documents(
    pieces: list[Piece], column: str, convert: Callable[..., str | None]
) -> Iterator[dict[str, str | None]]:
    """Yield the documents of pieces: passages of plain text, or what stands in a column, None where nothing does.

    Raises:
        UserError: If a file can't be read, or its column holds no document.
    """
    for piece in pieces:
        with readable(piece.path):
            for value in _values(piece, column):
                yield {"text": convert(value, source=piece.path)}


def text_document(text: object, column: str, source: str) -> str | None:
    """A document of plain text, None where a table has a gap; see `whole`.

    Raises:
        UserError: If it is no text.
    """
    if not isinstance(text, str | None):
        raise UserError(f"column {column!r} of {source!r} is not text: {text!r:.40}; name another text_field")
    return None if text is None else whole(text)


def whole(text: str) -> str:
    """Put U+FFFD in place of halves of characters, lone surrogates, which JSON can hold and no tokenizer takes."""
    return _LONE_SURROGATE.sub("\ufffd", text)


@contextmanager
def readable(
    what: str, remedy: str = "check the file", errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Name what is read in what a library raises over it.

    Raises:
        UserError: In place of any of `errors`; one that a library has wrapped comes out as it was.
    """
    try:
        yield
    except UserError:
        raise
    except errors as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        remedy = "convert it to UTF-8" if isinstance(cause, UnicodeError) else remedy
        said = reason(cause)
        if isinstance(cause, json.JSONDecodeError):  # which counts from the row's own beginning
            said = f"{cause.msg}: {cause.doc[max(0, cause.pos - 40) : cause.pos + 40]!r}"
        raise UserError(f"cannot read {what!r} ({said}); {remedy}") from error


def _open(path: Path | str) -> BinaryIO:
    """Open a file, unpacked if it begins like a packed one."""
    with Path(path).open("rb") as stream:
        head = stream.read(8)
    opener = next((opener for begin, opener in _OPENERS.items() if re.match(begin, head)), open)
    return cast("BinaryIO", opener(path, "rb"))


def _kind(file: Path, head: bytes) -> Kind:
    if head.startswith(b"PAR1"):
        return "table"
    if head.startswith(_POINTER):
        raise UserError(f"{str(file)!r} is a Git LFS pointer, not the file itself; run `git lfs pull` there")
    begin = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    if begin[:512].count("\0") > len(begin[:512]) // 4:
        raise UnicodeError("so many zeros are in UTF-16 and archives, not in text")
    if found := _OBJECTS.match(begin):
        return "list" if found[1] else "lines"
    if _NAME_OF_A_TABLE.search(file.name):
        raise UserError(
            f"{str(file)!r} has the name of a table and holds neither JSON objects nor Parquet; convert it to one of "
            "them, or name it .txt to read it as plain text"
        )
    return "text"


def _values(piece: Piece, column: str) -> Iterator[object]:
    from pyarrow.parquet import ParquetFile

    with _open(piece.path) as stream:
        if piece.kind == "text":
            with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
                yield from cut_passages(text)
        elif piece.kind == "table":
            for batch in ParquetFile(stream).iter_batches(_ROWS, columns=[column], use_threads=False):
                yield from batch.column(0).to_pylist()
        else:
            for row in _objects(stream, piece):
                yield row.get(column)


def _objects(stream: BinaryIO, piece: Piece) -> Iterator[dict[str, Any]]:
    lines = map(json.loads, _lines(stream, piece.start, piece.end))
    for value in json.load(stream) if piece.kind == "list" else lines:
        if not isinstance(value, dict):
            raise ValueError(f"{type(value).__name__} where an object should be")
        yield value


def _lines(stream: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    if start:
        stream.seek(start - 1)
        stream.readline()  # of the piece before, unless it ends right here
    while stream.tell() < end and (line := stream.readline()):
        if line.strip():
            yield line
