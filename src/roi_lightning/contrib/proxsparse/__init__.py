"""ProxSparse, a rival: weights that a proximal operator draws towards 2:4."""

from roi_lightning.contrib.proxsparse.module import ProxSparseModule

__all__ = ["ProxSparseModule"]
