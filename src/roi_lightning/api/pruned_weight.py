"""Where a weight is pruned, and what keeps LoRA adapters of it from filling the zeros."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roi_lightning.masks.layer_mask import LayerMask, unpack_bits


class PrunedWeight:
    """Where one weight is pruned; the packed mask follows the weight from device to device.

    Args:
        layer: The mask.
    """

    def __init__(self, layer: LayerMask) -> None:
        self._bits, self._columns, self._transposed = layer.packed, layer.shape[1], layer.transposed

    def zeroed(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor that is +0.0 where the weight is pruned.

        Args:
            tensor: Any, in the shape of the weight as stored.
        """
        return tensor.masked_fill(self._where(tensor.device), 0)

    def zero_(self, tensor: Tensor) -> None:
        """The same in place."""
        tensor.masked_fill_(self._where(tensor.device), 0)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is zero where the weight is pruned."""
        return not tensor[self._where(tensor.device)].any()

    def _where(self, device: torch.device) -> Tensor:
        bits = self._bits.to(device)
        self._bits = bits
        rows = ~unpack_bits(bits, self._columns)
        return rows.t() if self._transposed else rows


class MaskedLora:
    """What peft calls a LoRA variant: an adapter of a pruned weight whose product is zero wherever the weight is.

    Args:
        pruned: Where that is.
    """

    def __init__(self, pruned: PrunedWeight) -> None:
        self._pruned = pruned

    def supports_lora_conversion(self) -> bool:
        """Whether the product has the rank of the adapter; masked it has not."""
        return False

    def forward(self, layer: Any, active_adapter: str, x: Tensor, result: Tensor, **_: object) -> Tensor:
        """Add the masked product to what the base layer gives.

        Args:
            layer: peft's, with the adapter.
            active_adapter: Its name.
            x: [..., in], in the adapter's dtype.
            result: [..., out].
        """
        delta, bias = self._delta(layer, active_adapter), layer.lora_B[active_adapter].bias
        shift = None if bias is None else bias * layer.scaling[active_adapter]
        rows = delta.t() if layer.fan_in_fan_out else delta
        return result + F.linear(layer.lora_dropout[active_adapter](x), rows, shift)

    def merge_safe(self, layer: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The weight with the adapter in it."""
        return orig_weight + self._delta(layer, active_adapter).detach().to(orig_weight.dtype)

    def merge_unsafe(self, layer: Any, active_adapter: str, orig_weight: nn.Parameter) -> None:
        """The same in place."""
        orig_weight.data += self._delta(layer, active_adapter).detach()

    def unmerge(self, layer: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The weight without the adapter."""
        return orig_weight.data - self._delta(layer, active_adapter).detach().to(orig_weight.dtype)

    def _delta(self, layer: Any, adapter: str) -> Tensor:
        return self._pruned.zeroed(layer.get_delta_weight(adapter))
