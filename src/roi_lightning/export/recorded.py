"""What an exported directory says of its layers, found in a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_patterns import DENSE, layer_patterns
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import ChosenLayers, prunable_layers
from roi_lightning.models.source import SIDECAR, resolve_model
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.models.weight_names import stored_names


def export_directory(lm: str, revision: str | None = None) -> Path:
    """Where an export lies.

    Args:
        lm: Its directory, or a hub id of it.
        revision: Of a hub id.

    Raises:
        UserError: If it is no export.
    """
    source = resolve_model(lm, revision)
    if source.kind == "gguf" or not (source.directory / SIDECAR).is_file():
        raise UserError(
            f"{lm!r} is no exported directory, and only the kept weights of one can be trained on; give what fit, "
            "prune, apply or export wrote"
        )
    return source.directory


def recorded_patterns(sidecar: Mapping[str, Any]) -> dict[str, str]:
    """N:M or `dense` by the name of a tensor on disk."""
    layers, whole = sidecar["layers"], sidecar["pattern"]
    dense = sidecar.get("mixed_patterns", {}).get("dense", {})
    return {name: entry.get("pattern", whole) for name, entry in layers.items()} | dict.fromkeys(dense, DENSE)


def recorded_layers(lm: PreTrainedModel, export: Path, sidecar: Mapping[str, Any], spec: str) -> ChosenLayers:
    """The layers of a model that an export has masks of, by the names of its tensors.

    Args:
        lm: The dense model, which may be on the meta device.
        export: The directory.
        sidecar: Its own.
        spec: The dense model's name, for the error.

    Raises:
        UserError: If the model lacks one of the layers, or has it in another shape.
    """
    tensors, layers = StoredTensors(export), prunable_layers(lm)
    stored = stored_names(lm, [f"{name}.weight" for name in layers], tensors)
    names = {stored[f"{name}.weight"]: name for name in layers}
    recorded = recorded_patterns(sidecar)
    for tensor in recorded:
        shape = tuple(layers[names[tensor]].weight.shape) if tensor in names else None
        if shape != tensors.shape(tensor):
            raise UserError(
                f"{str(export)!r} was not made from {spec!r}: {tensor!r} is {list(tensors.shape(tensor))} there and "
                f"{shape and list(shape)} here; name the dense model that it was made from (base)"
            )
    patterns = {names[x]: None if pattern == DENSE else NMPattern(pattern) for x, pattern in recorded.items()}
    own = {name: layer for name, layer in layers.items() if name in patterns}
    return ChosenLayers(
        {name: layer for name, layer in own.items() if patterns[name] is not None},
        {name: layer for name, layer in own.items() if patterns[name] is None},
        layer_patterns({name: patterns[name] for name in own}),
    )
