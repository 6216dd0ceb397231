"""Callbacks: write the mask and the export, switch the estimator, log, resume."""

from roi_lightning.learning.callbacks.monitor import MaskMonitor
from roi_lightning.learning.callbacks.progress import PlainProgress
from roi_lightning.learning.callbacks.straight_through import StraightThroughToggle
from roi_lightning.learning.callbacks.summary import BaselineSummary
from roi_lightning.learning.callbacks.write_masks import HardenMasks, SparseExport

__all__ = [
    "BaselineSummary",
    "HardenMasks",
    "MaskMonitor",
    "PlainProgress",
    "SparseExport",
    "StraightThroughToggle",
]
