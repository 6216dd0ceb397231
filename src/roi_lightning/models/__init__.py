"""A causal LM: where it comes from, its tensors on disk, its linear layers and their names, its fingerprint."""

from roi_lightning.models.source import ModelSource, resolve_model

__all__ = ["ModelSource", "resolve_model"]
