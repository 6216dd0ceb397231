"""Is a directory one that can be packed: what is known before reading all of it."""

from pathlib import Path
from typing import Any, Final

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.runtime.packing import PATTERN
from roi_lightning.sources import is_packed

_WANTED: Final = "give one that fit, export, prune or apply wrote"


def check_packable(directory: Path) -> dict[str, Any]:
    """Refuse what can't be packed, even if it verifies.

    Returns:
        The directory's sidecar.

    Raises:
        UserError: If it is no directory, packed already, no export, or an export of another pattern.
    """
    if not directory.is_dir():
        raise UserError(f"{str(directory)!r} is no directory; {_WANTED}")
    if is_packed(directory):
        raise UserError(
            f"{str(directory)!r} is packed already; load it with roi_lightning.runtime.from_packed"
        )
    try:
        sidecar = read_sidecar(directory)
    except UserError as error:
        raise UserError(f"{str(directory)!r} can't be packed: its {error}; {_WANTED}") from error
    if sidecar["pattern"] != str(PATTERN):
        raise UserError(
            f"{str(directory)!r} has the pattern {sidecar['pattern']}, and only {PATTERN} can be packed; learn or "
            f"prune with {PATTERN}"
        )
    return sidecar
