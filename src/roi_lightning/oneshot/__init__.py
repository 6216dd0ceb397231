"""Masks without training: magnitude, Wanda and SparseGPT, layer after layer."""

from roi_lightning.oneshot.layerwise import Calibration, prune_layers
from roi_lightning.oneshot.magnitude import Magnitude
from roi_lightning.oneshot.method import CalibratedMethod, OneShotMethod, Pruned
from roi_lightning.oneshot.model import prune_model
from roi_lightning.oneshot.sparsegpt import SparseGPT
from roi_lightning.oneshot.store import TensorStore
from roi_lightning.oneshot.text import calibration_windows
from roi_lightning.oneshot.wanda import Wanda

METHODS: dict[str, type[OneShotMethod]] = {"magnitude": Magnitude, "wanda": Wanda, "sparsegpt": SparseGPT}

__all__ = [
    "METHODS",
    "CalibratedMethod",
    "Calibration",
    "Magnitude",
    "OneShotMethod",
    "Pruned",
    "SparseGPT",
    "TensorStore",
    "Wanda",
    "calibration_windows",
    "prune_layers",
    "prune_model",
]
