"""Files and directories that appear complete or not at all.

Everything is written under a temporary name in the same folder, flushed to the disk, and renamed. A run that
is interrupted or out of space leaves what was there before; temporary files of one that was killed are removed by
the next one that writes to the folder.
"""

import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from roi_lightning.errors import UserError

# Containers may share a name and a disk, and each count its processes by itself.
_PROCESSES: Final = Path("/proc/self/ns/pid")
_MACHINE: Final = re.sub(r"\W+", "_", platform.node()) + (
    f"_{_PROCESSES.stat().st_ino}" if _PROCESSES.exists() else ""
)
_SIBLING: Final = re.compile(
    r"\.(?P<name>.+)\.(?P<purpose>partial|old)-(?P<machine>\w*)-(?P<process>\d+)-\w+"
)
_A_DAY: Final = 24 * 3600.0


def check_writable(file: Path) -> None:
    """Refuse a path where a file can't be written, before any work for its content.

    Raises:
        UserError: If it is a folder, or the nearest folder above it can't be written to.
    """
    parent = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            f"{str(file)!r} can't be written; give the path of a file in a folder you may write to"
        )


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`, to be filled as a file or made a directory by the block.

    When the block ends well the sibling takes the name `path`, and what had that name is gone; when it
    raises anything, KeyboardInterrupt included, the sibling is removed and `path` is as it was.

    Args:
        path: The final name; missing parent folders are made.

    Raises:
        UserError: If the file system refuses (no space, no permission); the message names `path`.
    """
    partial = _sibling(path, "partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(path.parent)
        yield partial
        _flush(partial)
        _rename(partial, path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{str(path)!r} can't be written: {error}; make room or choose another place"
        ) from error
    finally:
        _remove(partial)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON with an indent of 2 and a newline at the end, complete or not at all.

    Raises:
        UserError: If the file system refuses; the message names `path`.
    """
    with written_aside(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def clear_abandoned(folder: Path) -> None:
    """Remove what processes that were killed left beside the files of a folder.

    Of a process on this machine it is known whether it still writes; another machine's is given a day. A directory
    that was about to be replaced gets its name back if its replacement never took it.
    """
    with suppress(OSError):  # a folder that can't be looked through can't be cleared
        for path in folder.iterdir():
            found = _SIBLING.fullmatch(path.name)
            if found is None or not _is_abandoned(path, found["machine"], int(found["process"])):
                continue
            if found["purpose"] == "old" and not path.with_name(found["name"]).exists():
                path.rename(path.with_name(found["name"]))
            else:
                _remove(path)


def _is_abandoned(path: Path, machine: str, process: int) -> bool:
    if machine != _MACHINE:
        with suppress(OSError):  # gone by now
            return time.time() - path.stat().st_mtime > _A_DAY
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, alive
        return False
    return False


def temporary_name(path: Path, purpose: str = "partial") -> str:
    """How the name of something temporary begins that is to become `path`; random characters have to follow."""
    return f".{path.name}.{purpose}-{_MACHINE}-{os.getpid()}-"


def _sibling(path: Path, purpose: str) -> Path:
    return path.with_name(temporary_name(path, purpose) + secrets.token_hex(3))


def _rename(partial: Path, path: Path) -> None:
    if not (partial.is_dir() and path.exists()):
        partial.replace(path)
    else:
        old = _sibling(path, "old")
        path.rename(old)
        try:
            partial.rename(path)
        except BaseException:
            old.rename(path)
            raise
        _remove(old)
    with suppress(OSError):  # the rename has happened; some network file systems can't sync a folder
        _sync(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    for entry in [*path.rglob("*"), path] if path.is_dir() else [path]:
        if entry.is_dir():
            with suppress(OSError):
                _sync(entry)
        else:
            _sync(entry)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
