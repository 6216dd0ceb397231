"""Callbacks: write the mask, the export and the report, switch the estimator, log, record, resume."""

from roi_lightning.learning.callbacks.monitor import MaskMonitor
from roi_lightning.learning.callbacks.progress import PlainProgress
from roi_lightning.learning.callbacks.record import KeepRecord
from roi_lightning.learning.callbacks.report import Report
from roi_lightning.learning.callbacks.straight_through import StraightThroughToggle
from roi_lightning.learning.callbacks.summary import BaselineSummary
from roi_lightning.learning.callbacks.write_masks import HardenMasks, SparseExport

__all__ = [
    "BaselineSummary",
    "HardenMasks",
    "KeepRecord",
    "MaskMonitor",
    "PlainProgress",
    "Report",
    "SparseExport",
    "StraightThroughToggle",
]
