"""The tensors of a packed directory: kept weights and indices of those that were masked, all others as they were.

Of a masked tensor `NAME` there are the kept weights by that name, `NAME_indices`, and of int8 ones `NAME_scales`,
see `Packed`. The sidecar says which form the kept weights have, lists these tensors with their dtype in a dense
checkpoint, and marks those that are [in, out] there (GPT-2's).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roi_lightning.contrib.packed.format import Packed, kept_inputs, pack, quantize, unpack
from roi_lightning.contrib.packed.packable import READ_BY_THE_MODEL
from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.models.layers import expert_layers, loaded_names, named_weights
from roi_lightning.models.stored_tensors import StoredTensors

# What sidecars call the format, and config.json its `quant_method`.
PACKED: Final = "roi_lightning.packed"
VERSION: Final = 4
# How kept weights are held: in the dtype of the dense checkpoint, or quantised.
Weights = Literal["stored", "int8"]
STORED: Final = "stored"
INT8: Final = "int8"


def packed_names(name: str, weights: Weights) -> tuple[str, ...]:
    """The names of a masked tensor's parts on disk."""
    return (name, f"{name}_indices", f"{name}_scales")[: 3 if weights == INT8 else 2]


def packed_form(name: str, tensor: Tensor, mask: LayerMask, weights: Weights) -> Packed:
    """Pack a tensor of a dense checkpoint.

    Args:
        name: For the error.
        tensor: As the checkpoint has it.
        mask: Which of its weights are kept; the others are zero.
        weights: How to hold those.

    Raises:
        UserError: If it can't be packed, see `pack`.
    """
    kept = mask.to_bool()
    packed = pack(tensor.T, kept.T, name) if mask.transposed else pack(tensor, kept, name)
    return quantize(packed) if weights == INT8 else packed


class PackedTensors:
    """A packed directory's tensors under the names of the dense checkpoint, read one at a time.

    Args:
        directory: Written by `write_packed`.

    Attributes:
        sidecar: Its content.
        weights: How kept weights are held.
        layers: Whether a dense checkpoint has the tensor as [in, out], by the name of every packed tensor.
        files: The weight file of every tensor.

    Raises:
        UserError: If the sidecar is not intact or not a packed directory's, or tensors are missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sidecar: dict[str, Any] = read_sidecar(directory, PACKED, VERSION)
        self.weights: Weights = self.sidecar["weights"]
        self._stored = StoredTensors(directory)
        self.layers = {name: bool(entry["transposed"]) for name, entry in self.sidecar["layers"].items()}
        parts = {part: name for name in self.layers for part in self._names(name)}
        if lost := parts.keys() - self._stored.files.keys():
            raise UserError(f"{str(directory)!r} lacks {min(lost)!r}; fetch or pack it again")
        self.files = {parts.get(name, name): file for name, file in self._stored.files.items()}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor as the dense checkpoint has it, except what int8 rounds."""
        if name not in self.layers:
            return self._stored[name]
        weight = unpack(self.packed(name), self._dtype(name))
        return weight.T.contiguous() if self.layers[name] else weight

    def packed(self, name: str) -> Packed:
        """A masked tensor, its rows the layer's outputs."""
        return Packed(*(self._stored[part] for part in self._names(name)))

    def _names(self, name: str) -> tuple[str, ...]:
        return packed_names(name, self.weights)

    def _dtype(self, name: str) -> torch.dtype:
        """What int8 weights were."""
        dtype: torch.dtype = getattr(torch, self.sidecar["layers"][name]["dtype"])
        return dtype

    def mask(self, name: str) -> LayerMask:
        """Which weights of a masked tensor were kept."""
        packed = self.packed(name)
        kept = torch.zeros(packed.shape, dtype=torch.bool).scatter_(1, kept_inputs(packed), True)
        return LayerMask.from_rows(kept, self.layers[name])


def packed_layers(shape: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Map layers to the names of their weights in a dense checkpoint.

    Args:
        shape: The model on the meta device.
        stored: Names of masked tensors.

    Raises:
        UserError: If one of them is no weight of a linear layer.
    """
    modules = dict(shape.named_modules())
    weights = loaded_names(shape, stored, named_weights(shape))
    experts = {layer for layers in expert_layers(shape).values() for layer in layers}
    layers = {name.removesuffix(".weight"): key for key, name in weights.items()}
    for name, key in layers.items():
        is_linear = name in experts or isinstance(modules.get(name), nn.Linear | Conv1D)
        if not is_linear or name.endswith(READ_BY_THE_MODEL):
            raise UserError(
                f"{key!r} can't run packed, as no linear layer multiplies by it; leave it out (ignore)"
            )
    return layers
