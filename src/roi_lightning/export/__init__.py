"""Write a masked model as an ordinary Hugging Face directory, and prove that it is one."""

from roi_lightning.export.base_tensors import SIDECAR, open_base
from roi_lightning.export.destination import check_destination, check_not_base, needed_bytes
from roi_lightning.export.fingerprint import base_model, check_masks_fit
from roi_lightning.export.verify import Check, VerifyReport, verify_export
from roi_lightning.export.write import write_export

__all__ = [
    "SIDECAR",
    "Check",
    "VerifyReport",
    "base_model",
    "check_destination",
    "check_masks_fit",
    "check_not_base",
    "needed_bytes",
    "open_base",
    "verify_export",
    "write_export",
]
