"""Turns a mask set into a verified Hugging Face directory with its model card."""

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
