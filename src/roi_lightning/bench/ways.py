"""The ways to take a product with a 2:4 weight."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.bench.shapes import Shape
from roi_lightning.bench.walk import Product
from roi_lightning.errors import UserError
from roi_lightning.products import is_widened, linear
from roi_lightning.runtime import Packed, PackedLinear, decode, gpu_products, pack, unpack
from roi_lightning.runtime.large_batches import check_device, pack_for_large_batches, why_not
from roi_lightning.runtime.packing import PATTERN
from roi_lightning.runtime.triton_products import MOST_FEW, takes_few

DENSE: Final = "dense"
WIDE: Final = "wide"
PACKED: Final = "packed"
# What the automatic choice does not choose from.
NOT_ALONE: Final = (DENSE, WIDE, PACKED)
_UNPACKED: Final = "unpacked"


class Weights:
    """Random 2:4 weights of one shape, dense and packed.

    Args:
        shape: (out, in).
        dtype: Of the weights.
        device: Where they lie.
        least: Bytes that all copies of the dense one are to have together.
        large_batches: Pack them for large batches, too.

    Attributes:
        copies: How many of each.
        nbytes: Of one weight, dense and packed.

    Raises:
        UserError: If they can't be packed for large batches.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, least: int, large_batches: bool = False
    ) -> None:
        weight = torch.randn(shape, device=device).mul_(shape[1] ** -0.5).to(dtype)
        mask = PATTERN.top(weight.abs())
        weight.masked_fill_(~mask, 0)
        packed = pack(weight, mask)
        self.copies = -(-least // weight.nbytes)
        self._dense = [weight.clone() for _ in range(self.copies)]
        self._packed = [PackedLinear(Packed(*(part.clone() for part in packed))) for _ in range(self.copies)]
        self.nbytes = {DENSE: weight.nbytes, PACKED: packed.nbytes}
        if large_batches:
            _add_large(self._packed)

    def ways(self, x: Tensor) -> dict[str, list[Product]]:
        """Products with each copy, by way.

        Args:
            x: What they are to multiply.

        Returns:
            `dense`; `wide`, what this project's dense layers do instead on some processors; `packed`, the automatic
            choice; and what it chooses from for so many rows.
        """
        ways: dict[str, list[Product]] = {DENSE: [partial(F.linear, weight=weight) for weight in self._dense]}
        if is_widened(x):
            ways[WIDE] = [partial(linear, weight=weight) for weight in self._dense]
        ways[PACKED] = [*self._packed]
        self._packed[0](x)  # finds out which kernels there are
        for layer in self._packed:
            for way, product in (_on_gpu if x.is_cuda else _on_processor)(layer, x):
                ways.setdefault(way, []).append(product)
        return ways


def _add_large(layers: list[PackedLinear]) -> None:
    check_device(layers[0].values.device)
    for layer in layers:
        if reason := why_not(layer.packed):
            raise UserError(f"--large_batches with weights of {layer.packed.shape}: {reason}; leave it out")
        layer.large = pack_for_large_batches(layer.packed)


def _on_processor(layer: PackedLinear, x: Tensor) -> Iterator[tuple[str, Product]]:
    if not decode.loops.broken:
        yield "loop", partial(decode.multiply, values=layer.values, places=layer.places, bias=None)
    yield _UNPACKED, partial(_unpacked, layer)


def _on_gpu(layer: PackedLinear, x: Tensor) -> Iterator[tuple[str, Product]]:
    if gpu_products.kernels.broken:
        yield _UNPACKED, partial(_unpacked, layer)
        return
    few = len(x) <= MOST_FEW and takes_few(layer.packed)
    for way in ("few_rows", "tiles", _UNPACKED) if few else ("tiles", _UNPACKED):
        yield way, partial(_multiply, gpu_products.WAYS[way], layer)
    if layer.large is not None:
        yield "sparse", partial(layer.large.multiply, bias=None)


def _multiply(product: Callable[[Tensor, Packed, None], object], layer: PackedLinear, x: Tensor) -> object:
    return product(x, layer.packed, None)


def _unpacked(layer: PackedLinear, x: Tensor) -> Tensor:
    dense = None if x.is_cuda else decode.unpack(*layer.packed)
    return linear(x, unpack(layer.packed) if dense is None else dense)
