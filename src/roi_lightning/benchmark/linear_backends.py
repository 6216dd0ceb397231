"""The kernels that multiply by a 2:4 weight, and a loop over copies of a weight that no cache holds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from roi_lightning.benchmark.models import Shape
from roi_lightning.benchmark.timing import Task, seconds
from roi_lightning.errors import UserError
from roi_lightning.runtime import Packed, PackedLinear, cpu_kernels, cuda_kernels, pack, unpack
from roi_lightning.runtime.packed_format import PATTERN
from roi_lightning.runtime.semi_structured import check_device, pack_semi_structured, why_not
from roi_lightning.runtime.triton_launch import MAX_FEW, takes_few

DENSE: Final = "dense"
PACKED: Final = "packed"
_UNPACKED: Final = "unpacked"
# Of one measurement on a CPU; there a product may take long.
_SECONDS: Final = 0.03

Product = Callable[[Tensor], object]


class Weights:
    """Random 2:4 weights of one shape, dense and packed.

    Args:
        shape: (out, in).
        dtype: Of the weights.
        device: Where they are stored.
        min_bytes: Of all copies of the dense one together.
        large_batches: Pack them for large batches, too.

    Attributes:
        copies: How many of each.
        nbytes: Of one weight, dense and packed.

    Raises:
        UserError: If they can't be packed for large batches.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        min_bytes: int,
        large_batches: bool = False,
    ) -> None:
        weight = torch.randn(shape, device=device).mul_(shape[1] ** -0.5).to(dtype)
        mask = PATTERN.top(weight.abs())
        weight.masked_fill_(~mask, 0)
        packed = pack(weight, mask)
        self.copies = -(-min_bytes // weight.nbytes)
        self._dense = [weight.clone() for _ in range(self.copies)]
        self._packed = [
            PackedLinear(Packed(*(part.clone() for part in packed.parts))) for _ in range(self.copies)
        ]
        self.nbytes = {DENSE: weight.nbytes, PACKED: packed.nbytes}
        if large_batches:
            _add_large(self._packed)

    def products(self, x: Tensor) -> dict[str, list[Product]]:
        """Products with each copy, by backend.

        Args:
            x: What they are to multiply.

        Returns:
            `dense`; `packed`, the automatic choice; and the kernels that it chooses from for so many rows.
        """
        products: dict[str, list[Product]] = {
            DENSE: [partial(F.linear, weight=weight) for weight in self._dense],
            PACKED: [*self._packed],
        }
        self._packed[0](x)  # finds out which kernels there are
        for layer in self._packed:
            for name, product in (_gpu_kernels if x.is_cuda else _cpu_kernels)(layer, x):
                products.setdefault(name, []).append(product)
        return products


def _add_large(layers: list[PackedLinear]) -> None:
    check_device(layers[0].weight.device)
    for layer in layers:
        if reason := why_not(layer.packed):
            raise UserError(f"--large_batches with weights of {layer.packed.shape}: {reason}; leave it out")
        layer.large = pack_semi_structured(layer.packed)


def _cpu_kernels(layer: PackedLinear, x: Tensor) -> Iterator[tuple[str, Product]]:
    if not cpu_kernels.kernels.disabled:
        yield "loop", partial(_loop, layer)
    yield _UNPACKED, partial(_unpacked, layer)


def _loop(layer: PackedLinear, x: Tensor) -> object:
    return cpu_kernels.multiply(x, *layer.packed, None)


def _gpu_kernels(layer: PackedLinear, x: Tensor) -> Iterator[tuple[str, Product]]:
    if cuda_kernels.kernels.disabled:
        yield _UNPACKED, partial(_unpacked, layer)
        return
    few = len(x) <= MAX_FEW and takes_few(layer.packed)
    for way in ("few_rows", _UNPACKED) if few else (_UNPACKED,):
        yield way, partial(_multiply, cuda_kernels.KERNELS[way], layer)
    if layer.large is not None:
        yield "sparse", partial(layer.large.multiply, bias=None)


def _multiply(product: Callable[[Tensor, Packed, None], object], layer: PackedLinear, x: Tensor) -> object:
    return product(x, layer.packed, None)


def _unpacked(layer: PackedLinear, x: Tensor) -> Tensor:
    return F.linear(x, unpack(layer.packed) if x.is_cuda else cpu_kernels.unpack(*layer.packed))


class ColdCacheLoop:
    """A task: products with one copy of a weight after the other, as decoding reads every layer once a token.

    On a GPU it replays all of them as one graph, so that the host's time for each launch plays no part; on a CPU
    it takes as many as fit a measurement.

    Args:
        products: With copies of one weight, in all more than the caches hold.
        x: [rows, in], for all of them.
        turn: Which copy is next, over and over; loops over the same copies share it, and none meets what another
            has just read.

    Attributes:
        steps: How many products it takes.
    """

    def __init__(self, products: Sequence[Product], x: Tensor, turn: Iterator[int]) -> None:
        if x.is_cuda:
            self.steps, self._task = len(products), _captured(partial(_run, products, x))
        else:
            self.steps, self._task = 1, lambda: _run((products[next(turn)] for _ in range(self.steps)), x)
            once = min(seconds(self._task, x.device) for _ in range(3))
            self.steps = max(1, min(len(products), int(_SECONDS / once)))

    def __call__(self) -> None:
        """Take the next `steps` products."""
        self._task()


@torch.inference_mode()
def _run(products: Iterable[Product], x: Tensor) -> None:
    for product in products:
        product(x)


def _captured(task: Task) -> Task:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        task()  # what is compiled or chosen at first use can't be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        task()
    return graph.replay
