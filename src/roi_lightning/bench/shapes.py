"""Shapes of linear layers, given or read from a model's configuration."""

import re
from collections import Counter
from typing import Final

from roi_lightning.errors import UserError
from roi_lightning.language_model import load_config, meta_language_model
from roi_lightning.prunable import input_dim, prunable_layers
from roi_lightning.runtime.packing import PATTERN
from roi_lightning.sources import ModelSource

Shape = tuple[int, int]
_SHAPE: Final = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def model_shapes(source: ModelSource) -> dict[Shape, int]:
    """(out, in) of the linear layers in a model's blocks, and how many have it; only the configuration is read.

    Raises:
        UserError: If there is no such model, or inputs of a layer do not come in fours.
    """
    found: Counter[Shape] = Counter()
    for name, layer in prunable_layers(meta_language_model(load_config(source))).items():
        rows, columns = layer.weight.shape if input_dim(layer) else layer.weight.shape[::-1]
        PATTERN.check(columns, name)
        found[rows, columns] += 1
    return dict(found)


def parse_shapes(text: str) -> dict[Shape, int]:
    """`3584x3584,18944x3584`: out × in, each once.

    Raises:
        UserError: If the text is anything else, or inputs do not come in fours.
    """
    matches = [_SHAPE.fullmatch(part) for part in text.split(",")]
    shapes = {(int(match[1]), int(match[2])): 1 for match in matches if match}
    if len(shapes) < len(matches):
        raise UserError(f"--shapes {text!r}: give outputs x inputs, each once, like 3584x3584,18944x3584")
    for rows, columns in shapes:
        PATTERN.check(columns, f"--shapes {rows}x{columns}")
    return shapes
