"""MaskPro, a rival: a categorical choice for each group, learned by policy gradients."""

from roi_lightning.contrib.maskpro.module import MaskProModule

__all__ = ["MaskProModule"]
