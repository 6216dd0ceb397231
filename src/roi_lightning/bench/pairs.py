"""A 2:4 model as transformers runs it, and the same with packed layers."""

from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.export.base import SIDECAR
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.language_model import load_config, max_positions, plain_language_model, plain_random_model
from roi_lightning.prunable import input_dim, prunable_layers
from roi_lightning.runtime import Accelerated, accelerate
from roi_lightning.runtime.packing import PATTERN
from roi_lightning.sources import ModelSource


@dataclass(frozen=True)
class Pair:
    """One model twice.

    Attributes:
        dense: As transformers runs it.
        packed: The twin, which shares nothing with it.
        accelerated: What became of the twin's layers.
    """

    dense: PreTrainedModel
    packed: PreTrainedModel
    accelerated: Accelerated


def check_source(source: ModelSource, length: int) -> None:
    """Refuse what can't be run so long, before weights are read.

    Args:
        source: The model.
        length: Tokens of a sequence at its end.

    Raises:
        UserError: If the model reads fewer tokens, or its sidecar names another pattern.
    """
    longest = max_positions(load_config(source))
    if longest is not None and length > longest:
        raise UserError(
            f"--prompt and --tokens make {length} tokens and model {source.spec!r} reads at most {longest}; "
            "lower them"
        )
    if source.kind == "directory" and (source.directory / SIDECAR).exists():
        pattern = read_sidecar(source.directory)["pattern"]
        if pattern != str(PATTERN):
            raise UserError(
                f"model {source.spec!r} is {pattern} sparse; only {PATTERN} models can be accelerated"
            )


def stored_model(source: ModelSource, device: torch.device) -> PreTrainedModel:
    """The model of a 2:4 directory on a device, as transformers loads it."""
    lm = plain_language_model(source)
    lm.to(device)  # type: ignore[arg-type]
    return lm


def random_model(source: ModelSource, device: torch.device) -> PreTrainedModel:
    """A model of the source's shape with random 2:4 weights in bfloat16."""
    lm = plain_random_model(source, device)
    lm.eval()
    for layer in prunable_layers(lm).values():
        weight = layer.weight.data
        weight.masked_fill_(~PATTERN.top(weight.abs(), input_dim(layer)), 0)
    return lm


def make_pair(lm: PreTrainedModel, large_batches: bool) -> Pair:
    """Put a packed twin beside a model.

    Raises:
        UserError: If the model is not 2:4 sparse.
    """
    packed = deepcopy(lm)
    return Pair(lm, packed, accelerate(packed, large_batches=large_batches))
