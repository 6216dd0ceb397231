"""A weight cut into chunks of whole groups along its first axis, each seen as [A, M, B].

A * B is the number of groups: B is 1 where the inputs are the weight's last axis ([out, in]); where they are
its first ([in, out]), A counts groups of inputs and B outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from roi_lightning.pattern import NMPattern
from roi_lightning.samplers.compiling import WORTH_COMPILING

# Numbers worked on at a time: temporaries stay in the processor's cache, and small beside the layer.
_CPU_CHUNK: Final = 1 << 18
_CUDA_CHUNK: Final = 1 << 24
# Compiled code has next to no temporaries.
_COMPILED_CPU_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Some rows of a weight.

    Attributes:
        rows: Which.
        first: The flat index of the first element in the whole weight.
        m: Members per group.
        dim: The weight's input dimension.
    """

    rows: slice
    first: int
    m: int
    dim: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view [A, M, B] of these rows of a contiguous tensor of the weight's shape."""
        return by_group(tensor[self.rows], self.m, self.dim)

    def members(self, tensor: Tensor) -> Tensor:
        """The same as a view [M, A, B]."""
        return self.of(tensor).movedim(1, 0)


def chunks(weight: Tensor, pattern: NMPattern, dim: int, compiled: bool = False) -> Iterator[Chunk]:
    """Cut a weight up.

    Args:
        weight: Two-dimensional, contiguous.
        pattern: The N:M pattern.
        dim: The weight's input dimension.
        compiled: Whether compiled code will work on the chunks.
    """
    rows, columns = weight.shape
    unit = 1 if dim == 1 else pattern.m
    step = max(1, chunk_size(weight, compiled) // (columns * unit)) * unit
    for start in range(0, rows, step):
        yield Chunk(slice(start, min(start + step, rows)), start * columns, pattern.m, dim)


def by_group(tensor: Tensor, m: int, dim: int) -> Tensor:
    """A contiguous tensor of a weight's shape (or some of its rows) as a view [A, M, B].

    Args:
        tensor: Two-dimensional.
        m: Members per group.
        dim: The weight's input dimension.
    """
    return tensor.view(-1, m, 1 if dim == 1 else tensor.shape[1])


def chunk_size(tensor: Tensor, compiled: bool) -> int:
    """How many numbers to work on at a time where this tensor is."""
    if tensor.is_cuda:
        return _CUDA_CHUNK
    return _COMPILED_CPU_CHUNK if compiled else _CPU_CHUNK


def worth_compiling(weight: Tensor) -> bool:
    """Whether a weight is large enough for compiled code to pay."""
    return weight.numel() >= WORTH_COMPILING
