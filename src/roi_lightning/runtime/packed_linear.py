"""A linear layer that holds a packed 2:4 weight."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from roi_lightning.runtime.large_batches import LargeBatches
from roi_lightning.runtime.packing import Packed
from roi_lightning.runtime.product import packed_linear


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` or GPT-2's `Conv1D` with a 2:4 weight; frozen.

    Args:
        packed: The weight.
        bias: [out] or None.

    Attributes:
        values: See `Packed`; a buffer.
        places: See `Packed`; a buffer.
        bias: A buffer, or None.
        large: The weight once more, for large batches; goes when the layer is moved or cast.
    """

    values: Tensor
    places: Tensor
    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.register_buffer("values", packed.values)
        self.register_buffer("places", packed.places)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.large: LargeBatches | None = None

    @property
    def packed(self) -> Packed:
        """The weight."""
        return Packed(self.values, self.places)

    @override
    def forward(self, x: Tensor) -> Tensor:
        large = self.large
        if large is not None and large.takes(x):
            return large.multiply(x, self.bias)
        held: dict[str, Any] = self._buffers  # attributes of a module take a microsecond each
        return packed_linear(x, held["values"], held["places"], held["bias"])

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.values
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if (self.values.device, self.values.dtype) != (before.device, before.dtype):
            self.large = None
        return self

    @override
    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
