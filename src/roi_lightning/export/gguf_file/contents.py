"""What a GGUF file holds of a model, tensor after tensor, and what it says of its own sparsity."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType, quantize
from torch import Tensor
from transformers import PreTrainedConfig

from roi_lightning.errors import UserError
from roi_lightning.export.gguf_file.architectures import extra_tensors, gguf_names, laid_out

Weights = Literal["f16", "bf16", "q8_0"]
FORMAT: Final = "roi_lightning.gguf"
VERSION: Final = 1
SPARSITY_KEY: Final = "roi_lightning.sparsity"
FILE_TYPES: Final = {
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_TYPES: Final = {
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
_LARGEST: Final = torch.finfo(torch.float16).max
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Entry:
    """A tensor of the file.

    Attributes:
        name: In the file.
        stored: On disk; None for what is computed from the configuration.
        shape: As on disk.
        type: What the file holds it in.
    """

    name: str
    stored: str | None
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        """In the file."""
        block, size = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape) // block * size)


def entries(config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], weights: Weights) -> list[Entry]:
    """All tensors of the file, in its order.

    Args:
        config: Of the model.
        shapes: Of its tensors on disk, by name.
        weights: What matrices are held in; all else is float32.

    Raises:
        UserError: If llama.cpp has no such model.
    """
    names = gguf_names(config, shapes)
    stored = [Entry(name, key, shapes[key], _type(shapes[key], weights)) for key, name in names.items()]
    extra = extra_tensors(config).items()
    return [*(Entry(name, None, tuple(x.shape), GGMLQuantizationType.F32) for name, x in extra), *stored]


def _type(shape: tuple[int, ...], weights: Weights) -> GGMLQuantizationType:
    wanted = _TYPES[weights]
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    # llama.cpp's own tools fall back to F16, too, where a row is no whole number of blocks.
    return GGMLQuantizationType.F16 if shape[-1] % GGML_QUANT_SIZES[wanted][0] else wanted


def encoded(
    config: PreTrainedConfig, entry: Entry, tensor: Tensor | None, mask: Tensor | None = None
) -> Array:
    """A tensor as the file holds it.

    Args:
        config: Of the model.
        entry: What to make.
        tensor: As on disk; None for what is computed from the configuration.
        mask: Boolean, of what is kept, in the file's order of rows; None for all.

    Raises:
        UserError: If a weight is too large for float16.
    """
    values = extra_tensors(config)[entry.name] if tensor is None else laid_out(config, entry.name, tensor)
    values = values if mask is None else values.masked_fill(~mask, 0)
    if entry.type == GGMLQuantizationType.F16 and values.abs().max() > _LARGEST:
        raise UserError(
            f"{entry.stored!r} has weights beyond float16's {_LARGEST:.0f}; write it with --weights bf16"
        )
    if entry.type == GGMLQuantizationType.Q8_0:
        values = _without_lost_blocks(values)
    array: Array = quantize(values.contiguous().numpy(), entry.type)
    return array


def _without_lost_blocks(values: Tensor) -> Tensor:
    """Zero where the scale of a block is: float16 has none so small, and signs would be all that is left."""
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0]
    blocks = values.reshape(-1, block)
    lost = (blocks.abs().amax(1, keepdim=True) / 127).half() == 0
    return blocks.masked_fill(lost, 0).reshape(values.shape)


def array_sha256(array: Array, kind: GGMLQuantizationType) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    summed = hashlib.sha256(f"{kind.name} {list(array.shape)} ".encode())
    summed.update(np.ascontiguousarray(array).view(np.uint8).data)
    return summed.hexdigest()


def metadata_sha256(metadata: Mapping[str, Any]) -> str:
    """SHA-256 of all other metadata: the model's settings, its tokenizer."""
    others = {key: _plain(value) for key, value in metadata.items() if key != SPARSITY_KEY}
    return hashlib.sha256(_spelled(others).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """A value as it is read back: floats have 32 bits."""
    if isinstance(value, float):
        return float(np.float32(value))
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def sparsity(sidecar: Mapping[str, Any], names: Mapping[str, str], weights: Weights) -> dict[str, Any]:
    """What the file says of its own masks, before its tensors are hashed.

    Args:
        sidecar: Of the export.
        names: Of tensors on disk → in the file.
        weights: What matrices are held in.
    """
    whole = sidecar["pattern"]
    return {
        "format": FORMAT,
        "version": VERSION,
        "weights": weights,
        "pattern": whole,
        "layers": {names[key]: entry.get("pattern", whole) for key, entry in sidecar["layers"].items()},
        "updated": sorted(names[key] for key in sidecar["updated"]),
        "base": sidecar["base"],
        "export_checksum": sidecar["checksum"],
    }


def render(description: Mapping[str, Any]) -> str:
    """How a file spells what it says of its masks, a checksum included."""
    text = _spelled(description)
    return _spelled(dict(description) | {"checksum": hashlib.sha256(text.encode()).hexdigest()})


def read_sparsity(text: str) -> dict[str, Any]:
    """What a file says of its masks.

    Raises:
        ValueError: If it is not as `render` spells it, or of another version.
    """
    description: dict[str, Any] = json.loads(text)
    if (description["format"], description["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{SPARSITY_KEY} is of another version")
    del description["checksum"]
    if render(description) != text:
        raise ValueError(f"{SPARSITY_KEY} does not match its own checksum")
    return description


def _spelled(description: Mapping[str, Any]) -> str:
    return json.dumps(description, sort_keys=True, separators=(",", ":"))
