"""Masks without training the model: magnitude, Wanda and SparseGPT, block after block."""

from roi_lightning.oneshot.methods import (
    CalibratedMethod,
    LayerResult,
    Magnitude,
    OneShotMethod,
    Wanda,
)
from roi_lightning.oneshot.pipeline import Activations, Calibration, prune_layers
from roi_lightning.oneshot.prune import TensorStore, calibration_text, calibration_windows, prune_model
from roi_lightning.oneshot.sparsegpt import SparseGPT

METHODS: dict[str, type[OneShotMethod]] = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    "sparsegpt": SparseGPT,
}

__all__ = [
    "METHODS",
    "Activations",
    "CalibratedMethod",
    "Calibration",
    "LayerResult",
    "Magnitude",
    "OneShotMethod",
    "SparseGPT",
    "TensorStore",
    "Wanda",
    "calibration_text",
    "calibration_windows",
    "prune_layers",
    "prune_model",
]
