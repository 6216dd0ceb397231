"""Callbacks: harden the mask, switch the estimator, export, watch."""

from roi_lightning.callbacks.harden import HardenMasks
from roi_lightning.callbacks.monitor import MaskMonitor
from roi_lightning.callbacks.progress import PlainProgress
from roi_lightning.callbacks.sparse_export import SparseExport
from roi_lightning.callbacks.straight_through import StraightThroughToggle
from roi_lightning.callbacks.summary import BaselineSummary

__all__ = [
    "BaselineSummary",
    "HardenMasks",
    "MaskMonitor",
    "PlainProgress",
    "SparseExport",
    "StraightThroughToggle",
]
