"""Calibration text: its sources, exact packing into windows, and an order that survives a resume."""

from roi_lightning.data.corpora import Corpus
from roi_lightning.data.datamodule import CalibrationDataModule

__all__ = ["CalibrationDataModule", "Corpus"]
