"""Load a packed directory as a transformers model that never had its dense weights, once its files are hashed."""

from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.contrib.packed.tensors import PACKED, VERSION, PackedTensors
from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar, require_intact
from roi_lightning.models.config import DType
from roi_lightning.models.loading import read_model
from roi_lightning.models.source import ModelSource, format_of, resolve_model


def from_packed(
    directory: str | Path,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """Load a packed directory, in eval mode, frozen; it takes as much memory as its files.

    `AutoModelForCausalLM.from_pretrained` loads it too, without the hashes, once this package is imported.

    Args:
        directory: What `pack` wrote, or a hub id of it.
        dtype: Of the activations, and of all weights but int8 ones; `auto` takes the stored one. On a CPU without
            instructions for it `float32` reads long prompts faster; weights of 16 bits take twice the memory then.
        device: Where to; the CPU if left out. Elsewhere the model is unpacked, which is logged.

    Raises:
        UserError: If it is no packed directory, or any of its files is missing or has changed since it was packed.
    """
    target = torch.device(device or "cpu")
    source = _packed_source(str(directory))
    open_packed(source.directory)
    lm = read_model(source, AutoModelForCausalLM, **source.pretrained, dtype=dtype)
    lm.requires_grad_(False)
    lm.config.name_or_path = source.spec
    if target.type != "cpu":
        lm.dequantize()
        lm.to(target)  # type: ignore[arg-type]
    return cast(PreTrainedModel, lm.eval())


def open_packed(directory: Path) -> PackedTensors:
    """The tensors of a packed directory, once all its files have been hashed.

    Raises:
        UserError: If any of them is missing or has changed since it was packed.
    """
    try:
        sidecar = read_sidecar(directory, PACKED, VERSION)
    except UserError as error:
        raise UserError(f"{str(directory)!r}: its {error}; fetch or pack it again") from error
    require_intact(directory, sidecar["files"])
    return PackedTensors(directory)


def _packed_source(spec: str) -> ModelSource:
    source = resolve_model(spec, compressed=True)
    if format_of(source.directory) != PACKED:
        raise UserError(
            f"{spec!r} is not packed: load it with transformers' from_pretrained, or pack it first "
            "(`roi-lightning pack`)"
        )
    return ModelSource(spec, "directory", source.directory, form=PACKED)
