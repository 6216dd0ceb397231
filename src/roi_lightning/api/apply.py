"""Set the weights that masks drop to zero."""

from collections.abc import Mapping

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.fingerprint import apply_masks, check_masks_fit_model, check_updates
from roi_lightning.models.loading import frozen_view
from roi_lightning.models.stored_tensors import tensor_sha256


def apply(lm: PreTrainedModel, masks: MaskSet, updates: Mapping[str, Tensor] | None = None) -> None:
    """Prune a model in place: dropped weights become exactly zero, the others stay as they are.

    Args:
        lm: The model that the masks were made for, in the same dtype or a wider one.
        masks: From `learn`, `prune` or `MaskSet.load`.
        updates: Weights that take the place of the model's beforehand, by names on disk: what SparseGPT made of them
            (`PruneResult.updates`).

    Raises:
        UserError: If the masks were made for other weights or have been applied already, or updates that belong to
            them are missing or others; the model is as it was then.
    """
    updates = updates or {}
    masks.check()
    check_updates(masks, updates)
    for name, tensor in updates.items():
        if tensor_sha256(tensor) != masks.updated.get(name):
            raise UserError(
                f"the update of {name!r} is not the one that these masks were made with; give that"
            )
    view = frozen_view(lm)
    check_masks_fit_model(view, masks)
    apply_masks(view, masks, updates)
