"""HyperPrune, a rival: a small network learns every block's masks, one block after another."""

from roi_lightning.contrib.hyperprune.method import HyperPrune

__all__ = ["HyperPrune"]
