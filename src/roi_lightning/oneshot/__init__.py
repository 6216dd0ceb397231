"""Masks without training the model: magnitude, Wanda and SparseGPT, block after block."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from roi_lightning.oneshot.methods import CalibratedMethod, LayerResult, Magnitude, OneShotMethod, Wanda
    from roi_lightning.oneshot.pipeline import Calibration, prune_layers
    from roi_lightning.oneshot.sparsegpt import SparseGPT

__all__ = [
    "CalibratedMethod",
    "Calibration",
    "LayerResult",
    "Magnitude",
    "OneShotMethod",
    "SparseGPT",
    "Wanda",
    "prune_layers",
]
_MODULES: Final = {"Calibration": "pipeline", "SparseGPT": "sparsegpt", "prune_layers": "pipeline"}


def __getattr__(name: str) -> Any:
    """A public name, imported with all it needs when it is first used: the settings alone are light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'methods')}"), name)
