"""A mask set to a verified Hugging Face directory with its model card."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from roi_lightning.export.destination import check_destination, check_not_base, needed_bytes
    from roi_lightning.export.verify import Check, VerifyReport, verify_export
    from roi_lightning.export.write import write_export

__all__ = [
    "Check",
    "VerifyReport",
    "check_destination",
    "check_not_base",
    "needed_bytes",
    "verify_export",
    "write_export",
]
_FILES: Final = {
    **dict.fromkeys(("check_destination", "check_not_base", "needed_bytes"), "destination"),
    **dict.fromkeys(("Check", "VerifyReport", "verify_export"), "verify"),
    "write_export": "write",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: learning takes a few of a sidecar's words alone."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
