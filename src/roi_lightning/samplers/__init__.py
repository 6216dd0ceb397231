"""Logits to the weight under a sampled mask: noise, temperatures, kernels, and the layer that uses them."""

from roi_lightning.samplers.base import Draw, KeptNorm, PerWeightSampler, Sampler
from roi_lightning.samplers.categorical import Categorical
from roi_lightning.samplers.gumbel_top_k import GumbelSubset, GumbelTopK, StraightThrough
from roi_lightning.samplers.reference import relaxed_top_n

__all__ = [
    "Categorical",
    "Draw",
    "GumbelSubset",
    "GumbelTopK",
    "KeptNorm",
    "PerWeightSampler",
    "Sampler",
    "StraightThrough",
    "relaxed_top_n",
]
