"""Prune a model's layers by what they receive from calibration text: block after block, or in one pass of the model.

Memory holds the hidden states between two blocks and the sums of one block's inputs; in one pass, a vector per layer.
The model is left as it was.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.experts import expert_layers
from roi_lightning.models.layers import input_dim
from roi_lightning.oneshot.block_runner import BlockRunner
from roi_lightning.oneshot.calibration_statistics import InputObserver, ObserverGroup
from roi_lightning.oneshot.methods import CalibratedMethod, LayerResult, OneShotMethod
from roi_lightning.utils.dtensor import full_tensor
from roi_lightning.utils.progress import progress

Activations = Literal["sequential", "dense"]


@dataclass(frozen=True)
class Calibration:
    """What layers are observed on.

    Attributes:
        windows: Token ids, int64 [count, seq_len].
        activations: `sequential`: a block receives what the pruned blocks before it give; `dense`: what the
            unpruned ones would, in one pass instead of two.
        device: Where blocks run.
        offload_dir: A folder for the hidden states, else they stay in memory.
        seed: Of what a method draws.
    """

    windows: Tensor
    activations: Activations = "sequential"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    offload_dir: Path | None = None
    seed: int = 0


@dataclass(frozen=True)
class _PruningRun:
    """What is to be done with every layer.

    Attributes:
        layers: To prune, by name.
        method: How.
        pattern: Of all layers, or of each.
        calibration: On what.
        experts: The names of layers that may receive no token.
        dtypes: In which weights are stored, where the model may hold wider ones.
        idle: Filled with those that received none.
    """

    layers: Mapping[str, nn.Module]
    method: CalibratedMethod
    pattern: Pattern
    calibration: Calibration
    experts: set[str]
    dtypes: Mapping[str, torch.dtype]
    idle: list[str] = field(default_factory=list)

    def observers(self) -> ObserverGroup:
        return ObserverGroup(self.method.observer, self.calibration.device)

    def is_idle(self, name: str, inputs: InputObserver) -> bool:
        """Whether a layer belongs to an expert that received no token."""
        return name in self.experts and not inputs.tokens

    def prune(self, name: str, observers: ObserverGroup) -> LayerResult:
        """Prune one layer by what it received."""
        layer, pattern, dtype = self.layers[name], self.pattern.of(name), self.dtypes.get(name)
        inputs = observers.of(name, layer)
        if self.is_idle(name, inputs):
            self.idle.append(name)
            return prune_layer(layer, self.method.without_inputs(), None, pattern, name, dtype)
        return prune_layer(layer, self.method, inputs, pattern, name, dtype)


@torch.no_grad()
def prune_layers(
    lm: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    method: OneShotMethod,
    pattern: Pattern,
    calibration: Calibration | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[tuple[str, LayerResult]]:
    """Prune a model's layers in its order; those of experts that no token reaches as the method says, with a warning.

    Wanda on `dense` activations takes one forward pass of the whole model where that is on the device already, also
    if it is sharded; everything else goes block by block.

    Args:
        lm: The model; unchanged once the iterator is exhausted or closed.
        layers: Linear layers inside its blocks, by dotted name.
        method: How.
        pattern: Of all layers, or of each by its name.
        calibration: On what; methods that read no text need none.
        dtypes: In which weights are stored, by layer; updates are made in these where the model holds wider ones.

    Yields:
        Layer name and result, in the orientation of the layer's weight, on the layer's device.

    Raises:
        UserError: If the model's layout or its activations do not allow it.
    """
    if not isinstance(method, CalibratedMethod):
        for name in progress(list(layers), "pruning layers"):
            yield name, prune_layer(layers[name], method, None, pattern.of(name), name)
        return
    assert calibration is not None, "this method reads text"
    run = _PruningRun(layers, method, pattern, calibration, expert_layers(lm), dtypes or {})
    yield from _prune_at_once(lm, run) if _fits_one_pass(lm, run) else _prune_blocks(lm, run)
    fate = "stay as they are" if method.without_inputs() is method else "are pruned by magnitude"
    if run.idle:
        warnings.warn(
            f"{len(run.idle)} of {len(run.experts)} layers of experts met no token of the calibration text and "
            f"{fate}, {run.idle[0]} first; more windows would reach more experts",
            stacklevel=2,
        )


def _fits_one_pass(lm: PreTrainedModel, run: _PruningRun) -> bool:
    """Whether the sums of all layers are small, and the model need not be moved block by block."""
    home, wanted = next(lm.parameters()).device, run.calibration.device
    at_home = home.type == wanted.type and wanted.index in (None, home.index)
    return at_home and run.calibration.activations == "dense" and run.method.observer.axes == 1


def _prune_at_once(lm: PreTrainedModel, run: _PruningRun) -> Iterator[tuple[str, LayerResult]]:
    observers = observed(lm, run.layers, run.method.observer, run.calibration.windows)
    for name in run.layers:
        yield name, run.prune(name, observers)


def observed(
    lm: PreTrainedModel, layers: Mapping[str, nn.Module], kind: type[InputObserver], windows: Tensor
) -> ObserverGroup:
    """What layers receive in one pass of the whole model.

    Args:
        lm: The model, on the device where it is to run.
        layers: By name.
        kind: Of the sums.
        windows: Token ids, int64 [count, seq_len].
    """
    device = next(lm.parameters()).device
    observers = ObserverGroup(kind, device)
    # A sharded model gathers its embeddings only where it is called as a whole.
    forward = lm if isinstance(lm, FSDPModule) else lm.base_model
    with observers.observing(layers):
        for window in progress(list(windows), "reading calibration windows"):
            forward(input_ids=window.unsqueeze(0).to(device), use_cache=False)
    return observers


def _prune_blocks(lm: PreTrainedModel, run: _PruningRun) -> Iterator[tuple[str, LayerResult]]:
    calibration, method = run.calibration, run.method
    blocks = BlockRunner(lm, calibration.windows, calibration.device, calibration.offload_dir)
    count = 1 + max(i for i in range(len(blocks)) if _inside(run.layers, blocks.prefix(i)))
    method.start(calibration.seed)
    for index in progress(range(count), f"pruning blocks of {calibration.windows.numel():,} tokens"):
        yield from _prune_block(blocks, index, run, index == count - 1)


def _prune_block(
    blocks: BlockRunner, index: int, run: _PruningRun, is_last: bool
) -> Iterator[tuple[str, LayerResult]]:
    layers = _inside(run.layers, blocks.prefix(index))
    sequential = run.calibration.activations == "sequential"
    with blocks.on_device(index):
        observers = run.observers()
        with observers.observing(layers):
            blocks.run(index, keep=not sequential)
        inputs = {name: observers.of(name, layer) for name, layer in layers.items()}
        seen = {name: layer for name, layer in layers.items() if not run.is_idle(name, inputs[name])}
        run.method.see_block(blocks, index, seen, inputs, run.pattern)
        with ExitStack() as pruned:
            for name, layer in layers.items():
                result = run.prune(name, observers)
                if sequential and not is_last:
                    pruned.enter_context(replaced(layer, result))
                yield name, result
            del observers, inputs
            if sequential and not is_last:
                blocks.run(index, keep=True)


def _inside(layers: Mapping[str, nn.Module], prefix: str) -> dict[str, nn.Module]:
    return {name: layer for name, layer in layers.items() if name.startswith(prefix)}


def prune_layer(
    layer: nn.Module,
    method: OneShotMethod,
    inputs: InputObserver | None,
    pattern: NMPattern,
    name: str,
    dtype: torch.dtype | None = None,
) -> LayerResult:
    """Prune one layer, gathered if it is sharded; the result has the orientation of its weight.

    A weight that is held in a wider dtype than `dtype` is cast to that, so that its update is rounded to it.

    Raises:
        UserError: If the observed sums can't be used.
    """
    assert isinstance(layer.weight, Tensor)
    weight = full_tensor(layer.weight.detach())
    if dtype is not None and torch.promote_types(weight.dtype, dtype) == weight.dtype:
        weight = weight.to(dtype)
    if inputs is not None:
        inputs.check(name)
    if input_dim(layer) == 1:
        return method.prune(weight, inputs, pattern, name)
    result = method.prune(weight.T, inputs, pattern, name)
    return LayerResult(result.mask.T, None if result.weight is None else result.weight.T.contiguous())


@contextmanager
def replaced(layer: nn.Module, result: LayerResult) -> Iterator[None]:
    """Have a layer compute with what a method made of its weight, afterwards with its own again."""
    parameter = layer.weight
    assert isinstance(parameter, nn.Parameter)
    original = parameter.data
    pruned = original.masked_fill(~result.mask, 0) if result.weight is None else result.weight
    parameter.data = pruned.to(original.dtype)
    try:
        yield
    finally:
        parameter.data = original
