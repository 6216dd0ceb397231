"""A linear layer that holds a packed 2:4 weight."""

from torch import Tensor, nn
from typing_extensions import override

from roi_lightning.products import linear
from roi_lightning.runtime.packing import Packed, unpack


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` with a 2:4 weight; frozen.

    Args:
        packed: The weight.
        bias: [out] or None.

    Attributes:
        values: See `Packed`; a buffer.
        places: See `Packed`; a buffer.
        bias: A buffer, or None.
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

    @property
    def packed(self) -> Packed:
        """The weight."""
        return Packed(self.values, self.places)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, unpack(self.packed), self.bias)
