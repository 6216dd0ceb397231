"""Turns logits into weights under a sampled mask: noise, temperatures, kernels."""

from roi_lightning.samplers.base import Draw, PerWeightSampler, Sampler, on_device
from roi_lightning.samplers.categorical import Categorical
from roi_lightning.samplers.gumbel_top_k import GumbelSubset, GumbelTopK, StraightThrough
from roi_lightning.samplers.reference import relaxed_top_n

__all__ = [
    "Categorical",
    "Draw",
    "GumbelSubset",
    "GumbelTopK",
    "PerWeightSampler",
    "Sampler",
    "StraightThrough",
    "on_device",
    "relaxed_top_n",
]
