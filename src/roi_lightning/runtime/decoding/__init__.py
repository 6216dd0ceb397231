"""Decoding on CPUs with all of a model's blocks in one C++ call for each token."""

from roi_lightning.runtime.decoding.fuse import fuse_decoding

__all__ = ["fuse_decoding"]
