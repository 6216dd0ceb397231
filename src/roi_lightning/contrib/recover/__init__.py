"""Train the kept weights of an exported model: `fit --config recover.yaml --lm EXPORT`; zeros stay exact."""

from roi_lightning.contrib.recover.module import RecoveryModule

__all__ = ["RecoveryModule"]
