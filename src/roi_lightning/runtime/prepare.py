"""What remains to be done once a model's layers are packed: compile their kernels, and refuse to save the model."""

from collections.abc import Mapping
from typing import NoReturn

import torch
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.runtime.cuda_kernels import warm_up
from roi_lightning.runtime.packable import warn_reasons
from roi_lightning.runtime.packed_linear import PackedLinear
from roi_lightning.runtime.semi_structured import pack_semi_structured, why_not

_SAVING = ("save_pretrained", "push_to_hub")


def prepare_layers(packed: Mapping[str, PackedLinear], dtype: torch.dtype, large_batches: bool) -> None:
    """Compile now what a first product would compile.

    Args:
        packed: The layers by name, on their final device.
        dtype: Of the model.
        large_batches: Pack each once more, see `accelerate`; those that can't be are logged.
    """
    reasons: dict[str, str] = {}
    for name, layer in packed.items():
        if layer.weight.is_cuda:
            warm_up(layer.packed, dtype)
        if large_batches:
            reason = why_not(layer.packed)
            if reason is None:
                layer.large = pack_semi_structured(layer.packed)
            else:
                reasons[name] = reason
    warn_reasons(reasons, len(packed), "are not packed for large batches")


def refuse_saving(lm: PreTrainedModel) -> None:
    """Have a model refuse to be saved, in place: no loader but ours could read what transformers would write."""
    for name in _SAVING:
        setattr(lm, name, _refuse)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UserError(
        "this model runs packed and can't be saved: keep the directory it came from, or make a packed one of it with "
        "`roi-lightning pack`"
    )
