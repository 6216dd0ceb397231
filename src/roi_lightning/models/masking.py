"""Masks on the weights of a model in memory."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.stored_tensors import tensor_sha256
from roi_lightning.models.weight_names import loaded_names


@torch.no_grad()
def apply_masks(lm: PreTrainedModel, masks: MaskSet, updates: Mapping[str, Tensor] | None = None) -> None:
    """Set the pruned weights of a model to zero, in place.

    Args:
        lm: The masks' base model, its experts split.
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
        lm: The model, its experts split, in the dtype of the masks' base or a wider one.
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
        if not has_hash(weight, masks.base.sha256[stored], masks.base.dtype):
            raise UserError(_mismatch(weight, layer, other, masks.base.dtype))


def has_hash(weight: Tensor, sha256: str, dtypes: str) -> bool:
    """Whether a weight, in one of some dtypes (`BaseModel.dtype`) that hold it without loss, is the one of a hash."""
    cast = (weight.to(getattr(torch, name)) for name in dtypes.split(", "))
    return any(torch.equal(x.to(weight.dtype), weight) and tensor_sha256(x) == sha256 for x in cast)


def _masked_weights(lm: PreTrainedModel, masks: MaskSet) -> dict[str, Tensor]:
    weights = dict(lm.named_parameters())
    return {stored: weights[name] for stored, name in loaded_names(lm, masks.layers, weights).items()}


def _mismatch(weight: Tensor, layer: LayerMask, other: str, dtypes: str) -> str:
    if not weight[~layer.to_bool().to(weight.device)].any():
        return f"{other} is pruned by them already; they can be applied only once"
    here = str(weight.dtype).removeprefix("torch.")
    return f"{other} has other values ({here} here, {dtypes} there); give the model they were made for"
