"""Masks by training: the LightningModules, Trainer, callbacks, checkpoints, and the memory plan."""

from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer

__all__ = ["RoILightningModule", "RoITrainer"]
