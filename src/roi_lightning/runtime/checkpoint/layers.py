"""Which layers of a model packed tensors are the weights of."""

from collections.abc import Iterable

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roi_lightning.errors import UserError
from roi_lightning.stored_names import loaded_names


def packed_layers(shape: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Map layers to the names of their weights in a dense checkpoint.

    Args:
        shape: The model on the meta device, its experts split.
        stored: Names of masked tensors.

    Raises:
        UserError: If one of them is no weight of a linear layer.
    """
    modules = dict(shape.named_modules())
    weights = loaded_names(shape, stored, dict(shape.named_parameters()))
    layers = {name.removesuffix(".weight"): key for key, name in weights.items()}
    for name, key in layers.items():
        if not isinstance(modules.get(name), (nn.Linear, Conv1D)):
            raise UserError(
                f"{key!r} is the weight of no linear layer, and can't run packed; leave it out (ignore)"
            )
    return layers
