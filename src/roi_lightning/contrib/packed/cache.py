"""A layer of a key-value cache that has room for more tokens, so that another one is written where it will stay."""

from typing import Self

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values may lie at the start of longer tensors.

    Attributes:
        buffers: The tensors [batch, heads, capacity, head] that hold keys and values; None before there are any.
        lengths: How many tokens of each are in use.
        writer: Who knows where to write the next token; nobody once others have changed keys or values.
    """

    buffers: list[Tensor | None]
    lengths: list[int]
    writer: object

    def __init__(self) -> None:
        self.buffers, self.lengths, self.writer = [None, None], [0, 0], None
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, layer: DynamicLayer) -> Self:
        """What another layer holds; nothing is copied."""
        made = cls()
        made.dtype, made.device = layer.dtype, layer.device
        made.is_initialized = layer.is_initialized
        made.keys, made.values = layer.keys, layer.values
        return made

    @property
    def keys(self) -> Tensor | None:
        """[batch, heads, tokens, head]."""
        return self._held(0)

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._hold(0, tensor)

    @property
    def values(self) -> Tensor | None:
        """[batch, heads, tokens, head]."""
        return self._held(1)

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._hold(1, tensor)

    def _held(self, which: int) -> Tensor | None:
        buffer = self.buffers[which]
        if buffer is None or buffer.ndim < 3 or buffer.shape[2] == self.lengths[which]:
            return buffer
        return buffer[:, :, : self.lengths[which]]

    def _hold(self, which: int, tensor: Tensor | None) -> None:
        self.buffers[which], self.writer = tensor, None
        self.lengths[which] = 0 if tensor is None or tensor.ndim < 3 else tensor.shape[2]

    def grow(self, capacity: int, writer: object) -> tuple[int, int]:
        """Move keys and values to longer tensors, contiguous ones.

        Returns:
            The addresses of both.
        """
        for which in (0, 1):
            held = self._held(which)
            assert held is not None
            buffer = held.new_empty((*held.shape[:2], capacity, held.shape[3]))
            buffer[:, :, : held.shape[2]] = held
            self.buffers[which] = buffer
        self.writer = writer
        keys, values = (0 if buffer is None else buffer.data_ptr() for buffer in self.buffers)
        return keys, values

    def append(self) -> None:
        """Another token is there, written behind the others by somebody else."""
        self.lengths[0] += 1
        self.lengths[1] += 1
