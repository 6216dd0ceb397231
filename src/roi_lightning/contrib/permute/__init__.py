"""Hidden channels of a model in an order that N:M masks lose less in; the model computes as before."""

from roi_lightning.contrib.permute.directory import FORMAT, verify_permuted, write_permuted

__all__ = ["FORMAT", "verify_permuted", "write_permuted"]
