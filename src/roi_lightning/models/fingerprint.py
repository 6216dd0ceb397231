"""Which model masks belong to, by a hash of every masked tensor, and masks on a model in memory."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import BaseModel, MaskSet
from roi_lightning.models.base_tensors import BaseTensors, open_base
from roi_lightning.models.layers import Layer, loaded_names, named_weights, stored_weights
from roi_lightning.models.source import ModelSource, resolve_model
from roi_lightning.models.stored_tensors import INDEX, WEIGHTS, StoredTensors, tensor_sha256
from roi_lightning.utils.progress import progress

_REMEDY: Final = "give the model it was made for"


def base_model(base: BaseTensors, names: Iterable[str]) -> BaseModel:
    """Describe the model that a mask is made for, with a hash per masked tensor, named as on disk.

    Raises:
        UserError: If the model has no tensor of such a name.
    """
    source, hashes, dtypes = base.source, {}, set()
    for name in progress(list(names), "hashing the base model"):
        if name not in base.files:
            raise UserError(f"{source.spec!r} stores no tensor {name!r}")
        hashes[name] = base.sha256(name)
        dtypes.add(str(base[name].dtype).removeprefix("torch."))
    return BaseModel(source.spec, source.commit, ", ".join(sorted(dtypes)), hashes)


def check_masks_fit(source: ModelSource | BaseTensors, masks: MaskSet) -> None:
    """Refuse masks that were made for another model.

    Raises:
        UserError: Naming the first tensor whose name, shape or bytes differ.
    """
    base = open_base(source, masks.base.dtype)
    other = f"mask file of another model: it was made for {masks.base.spec!r}, and in {base.source.spec!r}"
    for name, layer in progress(list(masks.layers.items()), "checking the base model"):
        if name not in base.files:
            raise UserError(f"{other} there is no tensor {name!r}; {_REMEDY}")
        if base.shape(name) != layer.stored_shape:
            shapes = f"{list(base.shape(name))}, not {list(layer.stored_shape)}"
            raise UserError(f"{other} {name!r} is {shapes}; {_REMEDY}")
        if base.sha256(name) != masks.base.sha256[name]:
            raise UserError(f"{other} {name!r} has other values; {_REMEDY}")


def check_updates(masks: MaskSet, updates: Mapping[str, Tensor]) -> None:
    """Refuse masks whose method updated weights that are not given.

    Raises:
        UserError: Saying how many are missing.
    """
    missing = masks.updated.keys() - updates.keys()
    if missing:
        raise UserError(
            f"these masks belong to weights that their method updated in {len(missing)} tensors, {min(missing)!r} "
            "first; they can't be applied to the base model's own: use the directory they were written with"
        )


def base_of(lm: PreTrainedModel, layers: Mapping[str, Layer]) -> ModelSource:
    """Where the weights of the layers to be pruned are stored.

    Returns:
        The directory or hub model it was loaded from, if the layers hold exactly what is stored there (in the same
        dtype or a wider one); else a source of kind `memory`. Warns of weights that have changed since.
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
        source = resolve_model(name, commit=commit)
        if source.kind == "directory":
            StoredTensors(source.directory)
    except UserError:  # no name, or nothing there that a mask could be of
        return None
    cached = (try_to_load_from_cache(name, file, revision=commit) for file in (WEIGHTS, INDEX))
    return source if source.kind == "directory" or any(isinstance(path, str) for path in cached) else None


def _holds(lm: PreTrainedModel, layers: Mapping[str, Layer], source: ModelSource) -> bool:
    tensors = StoredTensors(source.directory)
    try:
        names = stored_weights(source, lm, layers)
    except UserError:  # another model's files
        return False
    stored = progress(list(names.items()), "comparing with the stored weights")
    weights = named_weights(lm)
    return all(_same(weights[f"{layer}.weight"], tensors[name]) for layer, name in stored)


def _same(weight: Tensor, stored: Tensor) -> bool:
    mine = weight.cpu()
    cast = mine.to(stored.dtype)
    return torch.equal(cast, stored) and torch.equal(cast.to(mine.dtype), mine)


@torch.no_grad()
def apply_masks(lm: PreTrainedModel, masks: MaskSet, updates: Mapping[str, Tensor] | None = None) -> None:
    """Set the pruned weights of a model to zero, in place.

    Args:
        lm: The masks' base model.
        masks: They must fit.
        updates: Weights to set beforehand, by names on disk.

    Raises:
        UserError: If the model has no weight of a masked name.
    """
    for stored, weight in _masked_weights(lm, masks).items():
        if updates and stored in updates:
            weight.copy_(updates[stored])
        weight.masked_fill_(~masks.layers[stored].to_bool().to(weight.device), 0)


def check_masks_fit_model(lm: PreTrainedModel, masks: MaskSet) -> None:
    """Refuse masks that were made for other weights than a model has in memory.

    Args:
        lm: The model, in the dtype of the masks' base or a wider one.
        masks: Any.

    Raises:
        UserError: Naming the first weight whose name, shape or values differ, or that has been pruned already.
    """
    for stored, weight in _masked_weights(lm, masks).items():
        layer = masks.layers[stored]
        other = f"masks of another model: they were made for {masks.base.spec!r}, and here {stored!r}"
        if tuple(weight.shape) != layer.stored_shape:
            shapes = f"{list(weight.shape)}, not {list(layer.stored_shape)}"
            raise UserError(f"{other} is {shapes}; give the model they were made for")
        if not _has_hash(weight, masks.base.sha256[stored], masks.base.dtype):
            raise UserError(_mismatch(weight, layer, other, masks.base.dtype))


def _has_hash(weight: Tensor, sha256: str, dtypes: str) -> bool:
    """Whether a weight, in one of some dtypes (`BaseModel.dtype`) that hold it without loss, is the one of a hash."""
    cast = (weight.to(getattr(torch, name)) for name in dtypes.split(", "))
    return any(torch.equal(x.to(weight.dtype), weight) and tensor_sha256(x) == sha256 for x in cast)


def _masked_weights(lm: PreTrainedModel, masks: MaskSet) -> dict[str, Tensor]:
    weights = named_weights(lm)
    return {stored: weights[name] for stored, name in loaded_names(lm, masks.layers, weights).items()}


def _mismatch(weight: Tensor, layer: LayerMask, other: str, dtypes: str) -> str:
    if not weight[~layer.to_bool().to(weight.device)].any():
        return f"{other} is pruned by them already; they can be applied only once"
    here = str(weight.dtype).removeprefix("torch.")
    return f"{other} has other values ({here} here, {dtypes} there); give the model they were made for"
