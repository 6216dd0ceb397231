"""A packed model with dense layers again."""

from copy import deepcopy

from torch import nn

from roi_lightning.contrib.packed import PackedLinear, unpack


def unpacked(lm):
    """A copy with ordinary layers, which hold what the packed ones stand for."""
    lm = deepcopy(lm)
    for name, layer in list(lm.named_modules()):
        if isinstance(layer, PackedLinear):
            dense = nn.Linear(
                layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
            )
            dense.weight = nn.Parameter(unpack(layer.packed))
            dense.bias = None if layer.bias is None else nn.Parameter(layer.bias)
            lm.set_submodule(name, dense)
    return lm
