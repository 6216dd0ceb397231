"""Learn N:M sparsity masks for frozen language models, with PyTorch Lightning."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from roi_lightning.api.apply import apply
    from roi_lightning.api.evaluate import evaluate
    from roi_lightning.api.keep_zeros import keep_zeros
    from roi_lightning.api.learn import learn
    from roi_lightning.api.prune import prune
    from roi_lightning.data import CalibrationDataModule
    from roi_lightning.learning.roi import RoILightningModule

__all__ = [
    "CalibrationDataModule",
    "RoILightningModule",
    "apply",
    "evaluate",
    "keep_zeros",
    "learn",
    "prune",
]
_MODULES: Final = {"CalibrationDataModule": "data", "RoILightningModule": "learning"}
# transformers imports torchao wherever it is installed, and torchao warns of parts that other machines need.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """A public name, imported with all it needs when it is first used: the bare package is light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return __all__
