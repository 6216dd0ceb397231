"""Whether an export may be written to a directory: checked before a long run, and again when it ends."""

import os
import shutil
from pathlib import Path
from typing import Any, Final

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar, written_files
from roi_lightning.models.base_tensors import BaseTensors
from roi_lightning.models.source import SIDECAR, ModelSource

_MARGIN: Final = 1.05


def check_destination(
    out: Path, needed_bytes: int | None = None, *, overwrite: bool = False, run: str | None = None
) -> None:
    """Refuse a directory that an export can't or must not be written to.

    It may be absent or empty; an earlier export there may be replaced by its own run, or with `overwrite`.

    Args:
        out: The directory.
        needed_bytes: Its size, see `needed_bytes`; None to skip the check of the disk.
        overwrite: Whether an earlier export may be replaced.
        run: The fingerprint of a run whose own earlier export may be.

    Raises:
        UserError: If something is there that may not be replaced, the folder above is not writable, or the disk
            is too full.
    """
    if out.is_symlink() or out.exists():
        _require_replaceable(out, overwrite, run)
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{str(parent)!r} is no folder that can be written to; choose another --out")
    free = shutil.disk_usage(parent).free
    if needed_bytes is not None and free < needed_bytes * _MARGIN:
        raise UserError(
            f"{str(out)!r} needs {needed_bytes * _MARGIN / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "make room or choose another --out"
        )


def check_not_base(out: Path, source: ModelSource) -> None:
    """Refuse to write over the base model.

    Raises:
        UserError: If `out` is or holds the model's own directory or file.
    """
    if source.path is not None and source.path.is_relative_to(out.resolve()):
        raise UserError(f"{str(out)!r} holds the base model itself; choose another --out")


def needed_bytes(base: BaseTensors) -> int:
    """The size of an export in bytes: the weights, a bit for each (at most 1/8 of 8-bit ones), and change."""
    return base.nbytes + base.nbytes // 8 + 2**20


def _require_replaceable(out: Path, overwrite: bool, run: str | None) -> None:
    if out.is_dir() and not out.is_symlink():
        if not any(out.iterdir()):
            return
        if (out / SIDECAR).is_file():
            sidecar = _require_nothing_else(out)
            made_by = sidecar.get("training", {}).get("fingerprint")
            if overwrite or (run is not None and made_by == run):
                return
            raise UserError(
                f"{str(out)!r} is an earlier export; pass --overwrite to replace it, or choose another --out"
            )
    raise UserError(
        f"{str(out)!r} exists and was not written by roi_lightning; choose another --out or remove it"
    )


def _require_nothing_else(out: Path) -> dict[str, Any]:
    try:
        sidecar = read_sidecar(out, None)
    except UserError as error:
        raise UserError(f"{str(out)!r} exists and its {error}; choose another --out or remove it") from error
    others = set(written_files(out)) - set(sidecar["files"])
    if others:
        raise UserError(
            f"{str(out)!r} is an earlier export, but {min(others)!r} in it was not written by "
            "roi_lightning; move that away or choose another --out"
        )
    return sidecar
