"""The ways to multiply by a 2:4 weight on a CPU, and a loop over copies of a weight that no cache holds."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.speed.models import Shape
from benchmarks.speed.timing import seconds
from roi_lightning.contrib.packed import Packed, PackedLinear, kernels, pack
from roi_lightning.contrib.packed.format import PATTERN

DENSE: Final = "dense"
PACKED: Final = "packed"
# Of one measurement; a product may take long.
_SECONDS: Final = 0.03

Product = Callable[[Tensor], object]


class Weights:
    """Random 2:4 weights of one shape, dense and packed.

    Args:
        shape: (out, in).
        dtype: Of the weights.
        min_bytes: Of all copies of the dense one together.

    Attributes:
        copies: How many of each.
        nbytes: Of one weight, dense and packed.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, min_bytes: int) -> None:
        weight = torch.randn(shape).mul_(shape[1] ** -0.5).to(dtype)
        mask = PATTERN.top(weight.abs())
        weight.masked_fill_(~mask, 0)
        packed = pack(weight, mask)
        self.copies = -(-min_bytes // weight.nbytes)
        self._dense = [weight.clone() for _ in range(self.copies)]
        self._packed = [
            PackedLinear(Packed(*(part.clone() for part in packed.parts))) for _ in range(self.copies)
        ]
        self.nbytes = {DENSE: weight.nbytes, PACKED: packed.nbytes}

    def products(self, x: Tensor) -> dict[str, list[Product]]:
        """Products with each copy, by backend.

        Args:
            x: What they are to multiply.

        Returns:
            `dense`; `packed`, the automatic choice; and the kernels that it chooses from for so many rows.
        """
        self._packed[0](x)  # finds out whether there are kernels
        loops = {"loop": _loop} if not kernels.kernels.disabled else {}
        ways = {**loops, "unpacked": _unpacked}
        return {
            DENSE: [partial(F.linear, weight=weight) for weight in self._dense],
            PACKED: [*self._packed],
            **{name: [partial(kernel, layer) for layer in self._packed] for name, kernel in ways.items()},
        }


def _loop(layer: PackedLinear, x: Tensor) -> object:
    return kernels.multiply(x, *layer.packed, None)


def _unpacked(layer: PackedLinear, x: Tensor) -> Tensor:
    return F.linear(x, kernels.unpack(*layer.packed))


class ColdCacheLoop:
    """A task: products with one copy of a weight after the other, as decoding reads every layer once a token.

    It takes as many as fit a measurement.

    Args:
        products: With copies of one weight, in all more than the caches hold.
        x: [rows, in], for all of them.
        turn: Which copy is next, over and over; loops over the same copies share it, and none meets what another
            has just read.

    Attributes:
        steps: How many products it takes.
    """

    def __init__(self, products: Sequence[Product], x: Tensor, turn: Iterator[int]) -> None:
        self.steps, self._products, self._x, self._turn = 1, products, x, turn
        once = min(seconds(self) for _ in range(3))
        self.steps = max(1, min(len(products), int(_SECONDS / once)))

    @torch.inference_mode()
    def __call__(self) -> None:
        """Take the next `steps` products."""
        for _ in range(self.steps):
            self._products[next(self._turn)](self._x)
