"""A callback of your own: how unevenly the masks treat the inputs of the layers.

    roi-lightning fit --config quickstart.yaml --trainer.callbacks+ my_callback.CrowdedInputs

Any callback of Lightning works; `hard_masks` of the module is what it finds here besides.
"""

from collections import defaultdict

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from roi_lightning.learning.base import MaskLearningModule


class CrowdedInputs(Callback):
    """After every validation logs `crowded/KIND`: the largest fraction of outputs that keep one and the same input.

    Args:
        parts: Of a layer's name, counted from its end, that make its kind.
    """

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        crowded: dict[str, float] = defaultdict(float)
        for name, mask in pl_module.hard_masks():  # one layer at a time
            tag, kept = (
                "crowded/" + ".".join(name.split(".")[-self.parts :]),
                mask.to_rows(),
            )  # boolean [out, in]
            crowded[tag] = max(crowded[tag], float(kept.float().mean(0).max()))
        for logger in trainer.loggers:
            logger.log_metrics(crowded, trainer.global_step)
