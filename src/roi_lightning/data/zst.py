"""Zstandard files read to their end, or not at all."""

import io
from pathlib import Path
from typing import BinaryIO

import zstandard
from typing_extensions import override

_PIECE = 1 << 18


def open_zst(
    path: str | Path, mode: str = "rt", encoding: str | None = None, newline: str | None = None
) -> io.TextIOWrapper:
    """Open a compressed text file, as `gzip.open` does.

    The library's own `open` takes a file that was cut off for a shorter one; here reading past the cut raises.

    Args:
        path: The file, of one frame or several.
        mode: Only `rt`.
        encoding: Of the text.
        newline: As in `open`.

    Raises:
        EOFError: While reading, if the file ends within a frame.
    """
    if mode != "rt":
        raise ValueError(f"mode {mode!r}: only text can be read")
    return io.TextIOWrapper(
        io.BufferedReader(_Frames(Path(path).open("rb")), _PIECE), encoding, newline=newline
    )


class _Frames(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._held = b""

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._held and (data := self._file.read(_PIECE)):
            self._held = self._decompressed(data)
        if not self._held and self._frame is not None:
            raise EOFError("the compressed file ended before the end of its last frame")
        size = min(len(buffer), len(self._held))
        buffer[:size], self._held = self._held[:size], self._held[size:]
        return size

    def _decompressed(self, data: bytes) -> bytes:
        pieces = []
        while data:
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            pieces.append(self._frame.decompress(data))
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return b"".join(pieces)

    @override
    def close(self) -> None:
        self._file.close()
        super().close()
