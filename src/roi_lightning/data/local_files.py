"""Documents from text files, and from JSON lines that a reader can enter in the middle."""

import bz2
import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from roi_lightning.data.packing import cut_passages
from roi_lightning.data.zst import open_zst
from roi_lightning.errors import UserError

Piece = tuple[str, int, int]
OPENERS: Final[dict[str, Any]] = {
    ".gz": gzip.open,
    ".zst": open_zst,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
_PIECE: Final = 8 << 20  # bytes
_NO_END: Final = 1 << 62


def text_passages(files: Sequence[str], stamps: Sequence[object]) -> Iterator[dict[str, str]]:
    """Yield every file's passages; `stamps` (modification times, sizes) only tells caches apart."""
    for name in files:
        opener = OPENERS.get(Path(name).suffix, open)
        with opener(name, "rt", encoding="utf-8", newline="") as stream:
            for passage in cut_passages(stream):
                yield {"text": passage}


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


def json_documents(pieces: Sequence[Piece], field: str) -> Iterator[dict[str, str | None]]:
    """Yield the text of every JSON object that starts in one of the pieces, None where it has no `field`.

    Raises:
        UserError: If a line is no JSON object, its field no text, or the file can't be read.
    """
    for piece in pieces:
        for row in json_rows(piece):
            text = row.get(field)
            if not isinstance(text, str | None):
                raise UserError(f"column {field!r} of {piece[0]!r} is not text; choose another text_field")
            yield {"text": text}


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
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot read corpus file {name!r} ({reason}); check the file") from error


def _lines(name: str, start: int, end: int) -> Iterator[bytes]:
    with Path(name).open("rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()  # of the piece before, unless it ends right here
        while stream.tell() < end and (line := stream.readline()):
            if line.strip():
                yield line
