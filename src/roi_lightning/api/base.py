"""What the masks of a model in memory belong to: the files it was loaded from, or the model itself."""

import warnings
from collections.abc import Mapping

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.progress import progress
from roi_lightning.sources import ModelSource, StoredTensors, resolve_model
from roi_lightning.stored_names import stored_weights

_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def base_of(lm: PreTrainedModel, layers: Mapping[str, nn.Module]) -> ModelSource:
    """Where the weights of a model's layers lie.

    Args:
        lm: The model, its experts split.
        layers: Those to be pruned, by name.

    Returns:
        The directory or hub model it was loaded from, if the layers hold exactly what is stored there (in the same
        dtype or a wider one); else a source of kind `memory`. A warning tells of weights that are others by now.
    """
    memory = ModelSource(type(lm).__name__, "memory")
    source = _loaded_from(lm)
    if source is None:
        return memory
    if _holds(lm, layers, source):
        return source
    warnings.warn(
        f"this {memory.spec} does not hold the weights of {source.spec!r}, whose name it has: its masks are made for "
        "the weights in memory; save the model to apply them there",
        stacklevel=3,
    )
    return memory


def _loaded_from(lm: PreTrainedModel) -> ModelSource | None:
    """The directory, or the hub model in the cache, that bears the model's name; never fetched."""
    name, commit = lm.name_or_path or "", getattr(lm.config, "_commit_hash", None)
    try:
        source = resolve_model(name, commit)
        if source.kind == "directory":
            StoredTensors(source.directory)
    except UserError:  # no name, or nothing there that a mask could be of
        return None
    cached = (try_to_load_from_cache(name, file, revision=commit) for file in _WEIGHT_FILES)
    return source if source.kind == "directory" or any(isinstance(path, str) for path in cached) else None


def _holds(lm: PreTrainedModel, layers: Mapping[str, nn.Module], source: ModelSource) -> bool:
    tensors = StoredTensors(source.directory)
    try:
        names = stored_weights(source, lm, layers)
    except UserError:  # another model's files
        return False
    stored = progress(list(names.items()), "comparing with the stored weights")
    return all(_same(layers[layer].get_parameter("weight"), tensors[name]) for layer, name in stored)


def _same(weight: Tensor, stored: Tensor) -> bool:
    mine = weight.detach().cpu()
    cast = mine.to(stored.dtype)
    return torch.equal(cast, stored) and torch.equal(cast.to(mine.dtype), mine)
