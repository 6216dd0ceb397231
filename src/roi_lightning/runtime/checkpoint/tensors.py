"""The tensors of a packed directory: kept weights and indices of those that were masked, all others as they were.

Of a masked tensor `NAME.weight` there are `NAME.values` and `NAME.indices` (`NAME.places` in the format's version 1),
see `Packed`. The sidecar lists these tensors and marks those that a dense checkpoint has as [in, out] (GPT-2's).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import PACKED, read_sidecar
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.models.stored_tensors import PACKED_STEM, StoredTensors
from roi_lightning.models.weight_names import loaded_names
from roi_lightning.runtime.packed_format import Packed, kept_inputs, unpack


def packed_names(name: str, version: int) -> tuple[str, str]:
    """What values and indices of a masked tensor are called on disk, in a version of the format."""
    stem = name.removesuffix(".weight")
    return f"{stem}.values", f"{stem}.{'places' if version == 1 else 'indices'}"


class PackedTensors:
    """A packed directory's tensors under the names of the dense checkpoint, read one at a time.

    Args:
        directory: Written by `write_packed`.

    Attributes:
        sidecar: Its content.
        layers: Whether a dense checkpoint has the tensor as [in, out], by the name of every packed tensor.
        files: The weight file of every tensor.

    Raises:
        UserError: If the sidecar is not intact or not a packed directory's, or tensors are missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sidecar: dict[str, Any] = read_sidecar(directory, (PACKED,))
        self._stored = StoredTensors(directory, PACKED_STEM)
        self.layers = {name: bool(entry["transposed"]) for name, entry in self.sidecar["layers"].items()}
        parts = {part: name for name in self.layers for part in self._names(name)}
        if lost := parts.keys() - self._stored.files.keys():
            raise UserError(f"{str(directory)!r} lacks {min(lost)!r}; fetch or pack it again")
        self.files = {parts.get(name, name): file for name, file in self._stored.files.items()}

    @property
    def others(self) -> list[str]:
        """The tensors that were not masked."""
        return [name for name in self.files if name not in self.layers]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor as the dense checkpoint has it."""
        if name not in self.layers:
            return self._stored[name]
        weight = unpack(self.packed(name))
        return weight.T.contiguous() if self.layers[name] else weight

    def packed(self, name: str) -> Packed:
        """A masked tensor, its rows the layer's outputs."""
        values, indices = self._names(name)
        return Packed(self._stored[values], self._stored[indices])

    def _names(self, name: str) -> tuple[str, str]:
        return packed_names(name, self.sidecar["version"])

    def mask(self, name: str) -> LayerMask:
        """Which weights of a masked tensor were kept."""
        packed = self.packed(name)
        kept = torch.zeros(packed.shape, dtype=torch.bool).scatter_(1, kept_inputs(packed), True)
        transposed = self.layers[name]
        return LayerMask.from_bool(kept.T if transposed else kept, transposed)


def packed_layers(shape: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Map layers to the names of their weights in a dense checkpoint.

    Args:
        shape: The model on the meta device, its experts split.
        stored: Names of masked tensors.

    Raises:
        UserError: If one of them is no weight of a linear layer.
    """
    modules = dict(shape.named_modules())
    weights = loaded_names(shape, stored, dict(shape.named_parameters()))
    layers = {name.removesuffix(".weight"): key for key, name in weights.items()}
    for name, key in layers.items():
        if not isinstance(modules.get(name), (nn.Linear, Conv1D)):
            raise UserError(
                f"{key!r} is the weight of no linear layer, and can't run packed; leave it out (ignore)"
            )
    return layers
