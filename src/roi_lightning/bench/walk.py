"""Products with weights that no cache holds, as in decoding, where every layer's weight is read once a token."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from roi_lightning.bench.timing import Task, seconds

Product = Callable[[Tensor], object]
# Of one measurement on a processor; there a product may take long.
_SECONDS: Final = 0.03


class Walk:
    """A task: products with one copy of a weight after the other.

    On a GPU it replays all of them as one graph, so that the host's time for each launch plays no part; on a
    processor it takes as many as fit a measurement.

    Args:
        products: With copies of one weight, in all more than the caches hold.
        x: [rows, in], for all of them.
        turn: Which copy is next, over and over; walks over the same copies share it, and none meets what another
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
