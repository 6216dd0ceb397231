"""Pruning a model twice so that layers are met with the same inputs, whatever was found in those before them."""

import torch

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.oneshot import Calibration, prune_layers
from roi_lightning.oneshot.methods import LayerResult


def prune(lm, method, windows, device="cpu", leader=None):
    """Prune to 2:4.

    Args:
        lm: The model.
        method: A one-shot method of this call alone.
        windows: Token ids, [windows, seq_len].
        device: Where blocks are pruned.
        leader: What another call found, with which this one goes on; its own findings otherwise.

    Returns:
        What the method found, and what `prune_layers` gave, by layer.
    """
    found, own = {}, method.prune

    def prune_as_led(weight, inputs, pattern, name):
        found[name] = own(weight, inputs, pattern, name)
        if leader is None:
            return found[name]
        mask, values = leader[name].mask, leader[name].weight
        return LayerResult(mask.to(weight.device), values if values is None else values.to(weight.device))

    method.prune = prune_as_led
    calibration = Calibration(windows, device=torch.device(device))
    given = dict(prune_layers(lm, prunable_layers(lm), method, NMPattern("2:4"), calibration))
    return found, given


def least_agreement(found, other):
    """The share of equal mask entries in the layer that has least, and that layer's name."""
    assert found.keys() == other.keys()
    return min(((found[name].mask == other[name].mask.cpu()).float().mean(), name) for name in found)
