"""Run a pruned model in less memory."""

from importlib import import_module
from typing import Any

from transformers.modeling_utils import PreTrainedModel


def accelerate(lm: PreTrainedModel, *, large_batches: bool = False) -> Any:
    """Swap the 2:4 linear layers of a model for packed ones, in place; see `roi_lightning.runtime.accelerate`."""
    return import_module("roi_lightning.runtime").accelerate(lm, large_batches=large_batches)
