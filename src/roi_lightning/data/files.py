"""Read documents: from Python's own documentation, text files, and JSON lines entered at any byte."""

import ast
import bz2
import gzip
import importlib
import json
import lzma
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, TextIO

from roi_lightning.errors import UserError, reason

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Piece = tuple[str, int, int]
OPENERS: Final[dict[str, Any]] = {
    ".gz": gzip.open,
    ".zst": zstd.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
PASSAGE_CHARACTERS: Final = 10_000
_PIECE: Final = 8 << 20  # bytes
_NO_END: Final = 1 << 62
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


def text_passages(files: Sequence[str], stamps: Sequence[object]) -> Iterator[dict[str, str]]:
    """Yield every file's passages; `stamps` (modification times, sizes) only distinguishes caches."""
    for name in files:
        opener = OPENERS.get(Path(name).suffix, open)
        with opener(name, "rt", encoding="utf-8", newline="") as stream:
            for passage in cut_passages(stream):
                yield {"text": passage}


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


def cut_lines(files: Sequence[Path]) -> list[Piece]:
    """Cut files of lines into pieces of about 8 MiB: file, first byte, end.

    A line belongs to the piece in which it starts.
    """
    pieces = []
    for file in files:
        size = file.stat().st_size
        count = max(1, round(size / _PIECE))
        edges = [*(size * i // count for i in range(count)), _NO_END]
        pieces += [(str(file.resolve()), *edge) for edge in pairwise(edges)]
    return pieces


def json_documents(
    pieces: Sequence[Piece], column: str, convert: Callable[[object], str | None]
) -> Iterator[dict[str, str | None]]:
    """Yield the document of every JSON object that starts in one of the pieces, None where it has no `column`.

    Raises:
        UserError: If a line is no JSON object, its column no document, or the file can't be read.
    """
    for piece in pieces:
        for row in json_rows(piece):
            yield {"text": convert(row.get(column))}


def text_document(text: object, column: str, source: str) -> str | None:
    """A document of plain text, None where a table has a gap.

    Raises:
        UserError: If it is no text.
    """
    if not isinstance(text, str | None):
        raise UserError(f"column {column!r} of {source!r} is not text; choose another text_field")
    return text


def json_rows(piece: Piece) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects, one a line, that start in a piece.

    Raises:
        UserError: If a line is no JSON object, or the file can't be read.
    """
    name = piece[0]
    try:
        for line in _lines(*piece):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a line holds {type(row).__name__} where an object should be")
            yield row
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read corpus file {name!r} ({reason(error)}); check the file") from error


def _lines(name: str, start: int, end: int) -> Iterator[bytes]:
    with Path(name).open("rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()  # of the piece before, unless it ends right here
        while stream.tell() < end and (line := stream.readline()):
            if line.strip():
                yield line
