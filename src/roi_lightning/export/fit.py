"""Does a mask belong to a base model: the hashes taken when it is made, compared when it is applied."""

from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.export.base import BaseTensors, open_base
from roi_lightning.masks import BaseModel, MaskSet
from roi_lightning.progress import progress
from roi_lightning.sources import ModelSource, tensor_sha256

_REMEDY: Final = "give the model it was made for"


def base_model(
    source: ModelSource, names: Iterable[str], dtype: str = "auto", lm: PreTrainedModel | None = None
) -> BaseModel:
    """Describe the model that a mask is made for, with a hash per masked tensor.

    Args:
        source: Where the model lies.
        names: The masked tensors by their names on disk.
        dtype: See `open_base`.
        lm: See `open_base`.

    Raises:
        UserError: If the model has no tensor of such a name.
    """
    base = open_base(source, dtype, lm)
    hashes, dtypes = {}, set()
    for name in progress(list(names), "hashing the base model"):
        if name not in base.files:
            raise UserError(f"{source.spec!r} stores no tensor {name!r}")
        tensor = base[name]
        hashes[name] = tensor_sha256(tensor)
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
    return BaseModel(source.spec, source.commit, ", ".join(sorted(dtypes)), hashes)


def check_masks_fit(source: ModelSource, masks: MaskSet, base: BaseTensors | None = None) -> None:
    """Refuse masks that were made for another model.

    Args:
        source: The model they are to be applied to.
        masks: Any.
        base: Its tensors, if already open.

    Raises:
        UserError: Naming the first tensor whose name, shape or bytes differ.
    """
    base = base or open_base(source, masks.base.dtype)
    other = f"mask file of another model: it was made for {masks.base.spec!r}, and in {source.spec!r}"
    for name, layer in progress(list(masks.layers.items()), "checking the base model"):
        if name not in base.files:
            raise UserError(f"{other} there is no tensor {name!r}; {_REMEDY}")
        if base.shape(name) != layer.stored_shape:
            shapes = f"{list(base.shape(name))}, not {list(layer.stored_shape)}"
            raise UserError(f"{other} {name!r} is {shapes}; {_REMEDY}")
        if tensor_sha256(base[name]) != masks.base.sha256[name]:
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
