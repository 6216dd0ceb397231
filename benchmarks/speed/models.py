"""What is measured: a 2:4 model, dense and packed, and shapes of linear layers."""

import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.contrib.packed import Accelerated, accelerate
from roi_lightning.contrib.packed.format import PATTERN
from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.models.config import load_config, max_positions
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import meta_language_model
from roi_lightning.models.source import SIDECAR, ModelSource

Shape = tuple[int, int]
_SHAPE: Final = re.compile(r"([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True)
class Pair:
    """One model twice.

    Attributes:
        dense: As transformers runs it.
        packed: The twin, which shares nothing with it.
        accelerated: What `accelerate` did with the twin's layers.
    """

    dense: PreTrainedModel
    packed: PreTrainedModel
    accelerated: Accelerated


def check_source(source: ModelSource, length: int) -> None:
    """Refuse a model that can't be run at this length, before weights are read.

    Args:
        source: The model.
        length: Tokens of a complete sequence.

    Raises:
        UserError: If the model reads fewer tokens, or its sidecar names another pattern.
    """
    max_length = max_positions(load_config(source))
    if max_length is not None and length > max_length:
        raise UserError(
            f"--prompt and --tokens make {length} tokens and model {source.spec!r} reads at most {max_length}; "
            "lower them"
        )
    if source.kind == "directory" and (source.directory / SIDECAR).exists():
        pattern = read_sidecar(source.directory)["pattern"]
        if pattern != str(PATTERN):
            raise UserError(
                f"model {source.spec!r} is {pattern} sparse; only {PATTERN} models can be accelerated"
            )


def random_model(source: ModelSource) -> PreTrainedModel:
    """A model of the source's shape with random 2:4 weights in bfloat16."""
    lm = random_weights(source, torch.device("cpu"), torch.bfloat16)
    lm.eval()
    for layer in prunable_layers(lm).values():
        weight = layer.of(lm)
        weight.masked_fill_(~PATTERN.top(weight.abs()), 0)
    return lm


def random_weights(source: ModelSource, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the source's shape with random weights; none is read."""
    with torch.device(device):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(load_config(source), dtype=dtype)
    return lm


def make_pair(lm: PreTrainedModel) -> Pair:
    """Put a packed twin beside a model.

    Raises:
        UserError: If the model is not 2:4 sparse.
    """
    packed = deepcopy(lm)
    return Pair(lm, packed, accelerate(packed))


def model_shapes(source: ModelSource) -> dict[Shape, int]:
    """(out, in) of the linear layers in a model's blocks, and how many have it; only the configuration is read.

    Raises:
        UserError: If there is no such model, or a layer's number of inputs is no multiple of 4.
    """
    found: Counter[Shape] = Counter()
    for name, layer in prunable_layers(meta_language_model(load_config(source))).items():
        PATTERN.check(layer.shape[1], name)
        found[layer.shape] += 1
    return dict(found)


def parse_shapes(text: str) -> dict[Shape, int]:
    """`3584x3584,18944x3584`: out × in, each once.

    Raises:
        UserError: If the text is anything else, or a number of inputs is no multiple of 4.
    """
    matches = [_SHAPE.fullmatch(part) for part in text.split(",")]
    shapes = {(int(match[1]), int(match[2])): 1 for match in matches if match}
    if len(shapes) < len(matches):
        raise UserError(f"--shapes {text!r}: give outputs x inputs, each once, like 3584x3584,18944x3584")
    for rows, columns in shapes:
        PATTERN.check(columns, f"--shapes {rows}x{columns}")
    return shapes
