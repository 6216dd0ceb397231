"""Walk through a model block after block: measure what a block's layers meet, prune them, go on.

Memory holds the hidden states between two blocks and the statistics of one block. The model is left as it was.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.experts import expert_layers, tell_of_idle
from roi_lightning.oneshot.decoder import Decoder
from roi_lightning.oneshot.magnitude import Magnitude
from roi_lightning.oneshot.measuring import Measurement
from roi_lightning.oneshot.method import CalibratedMethod, OneShotMethod, Pruned
from roi_lightning.oneshot.statistics import InputStatistics
from roi_lightning.pattern import NMPattern
from roi_lightning.progress import progress
from roi_lightning.prunable import input_dim

Activations = Literal["sequential", "dense"]


@dataclass(frozen=True)
class Calibration:
    """What a walk measures on.

    Attributes:
        windows: Token ids, int64 [count, seq_len].
        activations: `sequential`: a block meets what the pruned blocks before it give; `dense`: what the
            unpruned ones would, in one pass instead of two.
        device: Where blocks run.
        spill: A folder for the hidden states, else they stay in memory.
    """

    windows: Tensor
    activations: Activations = "sequential"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    spill: Path | None = None


@dataclass(frozen=True)
class _Walk:
    """What is to be done in every block.

    Attributes:
        layers: To prune, by name.
        method: How.
        pattern: N:M.
        calibration: On what.
        experts: The names of layers that may meet no token.
        idle: Receives those that met none; magnitude prunes them.
    """

    layers: Mapping[str, nn.Module]
    method: CalibratedMethod
    pattern: NMPattern
    calibration: Calibration
    experts: set[str]
    idle: list[str] = field(default_factory=list)

    def prune(self, name: str, statistics: InputStatistics) -> Pruned:
        """Prune one layer by what it met."""
        layer = self.layers[name]
        if name in self.experts and not statistics.tokens:
            self.idle.append(name)
            return prune_layer(layer, Magnitude(), None, self.pattern, name)
        return prune_layer(layer, self.method, statistics, self.pattern, name)


@torch.no_grad()
def prune_layers(
    lm: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    method: OneShotMethod,
    pattern: NMPattern,
    calibration: Calibration | None = None,
) -> Iterator[tuple[str, Pruned]]:
    """Prune a model's layers in its order; those of experts that no token reaches by magnitude, with a warning.

    Args:
        lm: The model; unchanged once the walk is over or abandoned.
        layers: Linear layers inside its blocks, by dotted name.
        method: How.
        pattern: N:M.
        calibration: On what; methods that read no text need none.

    Yields:
        Layer name and result, in the orientation of the layer's weight, on the layer's device.

    Raises:
        UserError: If the model's layout or its activations do not allow it.
    """
    if not isinstance(method, CalibratedMethod):
        for name in progress(list(layers), "pruning layers"):
            yield name, prune_layer(layers[name], method, None, pattern, name)
        return
    assert calibration is not None, "this method reads text"
    decoder = Decoder(lm, calibration.windows, calibration.device, calibration.spill)
    last = max(i for i in range(len(decoder.blocks)) if _inside(layers, decoder.prefix(i)))
    walk = _Walk(layers, method, pattern, calibration, expert_layers(lm))
    for index in progress(range(last + 1), f"pruning blocks of {calibration.windows.numel():,} tokens"):
        yield from _prune_block(decoder, index, walk, index == last)
    tell_of_idle(lm, walk.idle)


def _prune_block(decoder: Decoder, index: int, walk: _Walk, is_last: bool) -> Iterator[tuple[str, Pruned]]:
    mine = _inside(walk.layers, decoder.prefix(index))
    sequential = walk.calibration.activations == "sequential"
    with decoder.visiting(index):
        measured = Measurement(lambda size: walk.method.statistics(size, walk.calibration.device))
        with measured.watching(mine):
            _pass(decoder, index, keep=not sequential)
        with ExitStack() as pruned:
            for name, layer in mine.items():
                result = walk.prune(name, measured.of(name, layer))
                if sequential and not is_last:
                    pruned.enter_context(_replaced(layer, result))
                yield name, result
            del measured
            if sequential and not is_last:
                _pass(decoder, index, keep=True)


def _inside(layers: Mapping[str, nn.Module], prefix: str) -> dict[str, nn.Module]:
    return {name: layer for name, layer in layers.items() if name.startswith(prefix)}


def _pass(decoder: Decoder, index: int, keep: bool) -> None:
    for window in range(len(decoder.hidden)):
        output = decoder.run(index, window)
        if keep:
            decoder.hidden[window] = output


def prune_layer(
    layer: nn.Module, method: OneShotMethod, statistics: InputStatistics | None, pattern: NMPattern, name: str
) -> Pruned:
    """Prune one layer; the result has the orientation of its weight.

    Raises:
        UserError: If the statistics can't be used.
    """
    assert isinstance(layer.weight, Tensor)
    weight = layer.weight.detach()
    if statistics is not None:
        statistics.check(name)
    if input_dim(layer) == 1:
        return method.prune(weight, statistics, pattern, name)
    result = method.prune(weight.T, statistics, pattern, name)
    return Pruned(result.mask.T, None if result.weight is None else result.weight.T.contiguous())


@contextmanager
def _replaced(layer: nn.Module, result: Pruned) -> Iterator[None]:
    parameter = layer.weight
    assert isinstance(parameter, nn.Parameter)
    original = parameter.data
    parameter.data = original.masked_fill(~result.mask, 0) if result.weight is None else result.weight
    try:
        yield
    finally:
        parameter.data = original
