"""Logits to masks."""

from roi_lightning.samplers.base import Draw, Sampler
from roi_lightning.samplers.categorical import Categorical
from roi_lightning.samplers.reference import relaxed_top_n
from roi_lightning.samplers.topk import GumbelTopK, StraightThrough

__all__ = ["Categorical", "Draw", "GumbelTopK", "Sampler", "StraightThrough", "relaxed_top_n"]
