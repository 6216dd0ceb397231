"""The ways to take a product with a 2:4 weight."""

from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.bench.shapes import Shape
from roi_lightning.bench.walk import Product
from roi_lightning.products import is_widened, linear
from roi_lightning.runtime import Packed, PackedLinear, pack, unpack
from roi_lightning.runtime.packing import PATTERN

DENSE: Final = "dense"
WIDE: Final = "wide"
PACKED: Final = "packed"
UNPACKED: Final = "unpacked"
# What the automatic choice does not choose from.
NOT_ALONE: Final = (DENSE, WIDE, PACKED)


class Weights:
    """Random 2:4 weights of one shape, dense and packed.

    Args:
        shape: (out, in).
        dtype: Of the weights.
        device: Where they lie.
        least: Bytes that all copies of the dense one are to have together.

    Attributes:
        nbytes: Of one weight, dense and packed.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, least: int) -> None:
        weight = torch.randn(shape, device=device).mul_(shape[1] ** -0.5).to(dtype)
        mask = PATTERN.top(weight.abs())
        weight.masked_fill_(~mask, 0)
        packed = pack(weight, mask)
        copies = -(-least // weight.nbytes)
        self._dense = [weight.clone() for _ in range(copies)]
        self._packed = [PackedLinear(Packed(*(part.clone() for part in packed))) for _ in range(copies)]
        self.nbytes = {DENSE: weight.nbytes, PACKED: packed.nbytes}

    def ways(self, x: Tensor) -> dict[str, list[Product]]:
        """Products with each copy, by way: dense, what this processor's dense layers do instead, packed, its parts.

        Args:
            x: What they are to multiply.
        """
        ways: dict[str, list[Product]] = {DENSE: [partial(F.linear, weight=weight) for weight in self._dense]}
        if is_widened(x):
            ways[WIDE] = [partial(linear, weight=weight) for weight in self._dense]
        ways[PACKED] = [*self._packed]
        ways[UNPACKED] = [partial(_unpacked, layer) for layer in self._packed]
        return ways


def _unpacked(layer: PackedLinear, x: Tensor) -> Tensor:
    return linear(x, unpack(layer.packed))
