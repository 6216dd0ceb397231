"""Prune a whole model into a mask set."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.export import open_base
from roi_lightning.export.fit import base_model
from roi_lightning.layer_mask import LayerMask
from roi_lightning.masks import MaskSet
from roi_lightning.oneshot.layerwise import Calibration, prune_layers
from roi_lightning.oneshot.method import OneShotMethod
from roi_lightning.pattern import NMPattern
from roi_lightning.prunable import input_dim
from roi_lightning.sources import ModelSource, tensor_sha256
from roi_lightning.stored_names import stored_weights


def prune_model(
    source: ModelSource,
    lm: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    method: OneShotMethod,
    pattern: NMPattern,
    calibration: Calibration | None,
    keep: Callable[[str, Tensor], None],
) -> MaskSet:
    """Prune a model's layers; the model itself stays as it is.

    Args:
        source: Where the model was loaded from.
        lm: The model.
        layers: Its layers to prune, by dotted name.
        method: How.
        pattern: N:M.
        calibration: On what; None for methods that read no text.
        keep: Receives every masked tensor whose survivors changed, by its name on disk.

    Returns:
        The masks, by names on disk, with the hashes of the base's tensors and of the updated ones.

    Raises:
        UserError: If the model's layout or its activations do not allow it, or the disk refuses.
    """
    stored = stored_weights(source, lm, layers)
    dtype = str(lm.dtype).removeprefix("torch.")
    tensors = open_base(source, dtype, lm)
    masks: dict[str, LayerMask] = {}
    hashes: dict[str, str] = {}
    for layer, pruned in prune_layers(lm, layers, method, pattern, calibration):
        name = stored[layer]
        masks[name] = LayerMask.from_bool(pruned.mask.cpu(), transposed=input_dim(layers[layer]) == 0)
        if pruned.weight is not None:
            if pruned.weight.dtype != tensors[name].dtype:
                raise UserError(
                    f"{name} is stored as {tensors[name].dtype} and its update was made in {pruned.weight.dtype}, "
                    "which would not fit; run the model in its stored dtype (no --dtype), or take the mask alone "
                    "(--mask_only)"
                )
            keep(name, pruned.weight)
            hashes[name] = tensor_sha256(pruned.weight)
    ordered = {name: masks[name] for name in stored.values()}
    return MaskSet(pattern, ordered, base_model(source, ordered, dtype, lm), hashes)
