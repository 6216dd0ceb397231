"""Prune a model's layers by what they receive from calibration text: block after block, or in one pass of the model.

Memory holds the hidden states between two blocks and the sums of one block's inputs; in one pass, a vector per layer.
The model is left as it was.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import Layer
from roi_lightning.oneshot.block_runner import BlockRunner
from roi_lightning.oneshot.calibration_statistics import InputObserver, ObserverGroup
from roi_lightning.oneshot.methods import CalibratedMethod, LayerResult, OneShotMethod
from roi_lightning.oneshot.settings import Activations
from roi_lightning.utils.dtensor import full_tensor
from roi_lightning.utils.progress import progress


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
        lm: The model.
        layers: To prune, by name.
        method: How.
        pattern: Of all layers, or of each.
        calibration: On what.
        dtypes: In which weights are stored, where the model may hold wider ones.
        idle: Filled with those that received none.
    """

    lm: PreTrainedModel
    layers: Mapping[str, Layer]
    method: CalibratedMethod
    pattern: Pattern
    calibration: Calibration
    dtypes: Mapping[str, torch.dtype]
    idle: list[str] = field(default_factory=list)

    def is_idle(self, name: str, inputs: InputObserver) -> bool:
        """Whether a layer belongs to an expert that received no token."""
        return self.layers[name].expert is not None and not inputs.tokens

    def prune(self, name: str, observers: ObserverGroup) -> LayerResult:
        """Prune one layer by what it received."""
        layer, pattern, dtype = self.layers[name], self.pattern.of(name), self.dtypes.get(name)
        inputs = observers.of(name, layer)
        if self.is_idle(name, inputs):
            self.idle.append(name)
            return prune_layer(self.lm, layer, self.method.without_inputs(), None, pattern, name, dtype)
        return prune_layer(self.lm, layer, self.method, inputs, pattern, name, dtype)


@torch.no_grad()
def prune_layers(
    lm: PreTrainedModel,
    layers: Mapping[str, Layer],
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
        layers: Inside its blocks, by dotted name.
        method: How.
        pattern: Of all layers, or of each by its name.
        calibration: On what; methods that read no text need none.
        dtypes: In which weights are stored, by layer; updates are made in these where the model holds wider ones.

    Yields:
        Layer name and result, [out, in], on the layer's device.

    Raises:
        UserError: If the model's layout or its activations do not allow it.
    """
    if not isinstance(method, CalibratedMethod):
        for name in progress(list(layers), "pruning layers"):
            yield name, prune_layer(lm, layers[name], method, None, pattern.of(name), name)
        return
    assert calibration is not None, "this method reads text"
    run = _PruningRun(lm, layers, method, pattern, calibration, dtypes or {})
    if _fits_one_pass(lm, run):
        observers = observed(lm, layers, method.observer, calibration.windows)
        for name in layers:
            yield name, run.prune(name, observers)
    else:
        yield from _prune_blocks(lm, run)
    fate = "stay as they are" if method.without_inputs() is method else "are pruned by magnitude"
    if run.idle:
        experts = sum(layer.expert is not None for layer in layers.values())
        warnings.warn(
            f"{len(run.idle)} of {experts} layers of experts met no token of the calibration text and "
            f"{fate}, {run.idle[0]} first; more windows would reach more experts",
            stacklevel=2,
        )


def _fits_one_pass(lm: PreTrainedModel, run: _PruningRun) -> bool:
    """Whether the sums of all layers are small, and the model need not be moved block by block."""
    home, wanted = next(lm.parameters()).device, run.calibration.device
    at_home = home.type == wanted.type and wanted.index in (None, home.index)
    return at_home and run.calibration.activations == "dense" and run.method.observer.axes == 1


def observed(
    lm: PreTrainedModel, layers: Mapping[str, Layer], kind: type[InputObserver], windows: Tensor
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
    with observers.observing(lm, layers):
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
        observers = ObserverGroup(run.method.observer, run.calibration.device)
        with observers.observing(run.lm, layers):
            blocks.run(index, keep=not sequential)
        inputs = {name: observers.of(name, layer) for name, layer in layers.items()}
        seen = {name: layer for name, layer in layers.items() if not run.is_idle(name, inputs[name])}
        run.method.see_block(blocks, index, seen, inputs, run.pattern)
        goes_on = sequential and not is_last
        with own_weights(run.lm, layers.values()) if goes_on else nullcontext():
            for name, layer in layers.items():
                result = run.prune(name, observers)
                if goes_on:
                    write_result(run.lm, layer, result)
                yield name, result
            del observers, inputs
            if goes_on:
                blocks.run(index, keep=True)


def _inside(layers: Mapping[str, Layer], prefix: str) -> dict[str, Layer]:
    return {name: layer for name, layer in layers.items() if name.startswith(prefix)}


def prune_layer(
    lm: nn.Module,
    layer: Layer,
    method: OneShotMethod,
    inputs: InputObserver | None,
    pattern: NMPattern,
    name: str,
    dtype: torch.dtype | None = None,
) -> LayerResult:
    """Prune one layer of a model, gathered if it is sharded; the result is [out, in].

    A weight that is held in a wider dtype than `dtype` is cast to that, so that its update is rounded to it.

    Raises:
        UserError: If the observed sums can't be used.
    """
    weight = layer.view(full_tensor(lm.get_parameter(layer.parameter).detach()))
    if dtype is not None and torch.promote_types(weight.dtype, dtype) == weight.dtype:
        weight = weight.to(dtype)
    if inputs is not None:
        inputs.check(name)
    return method.prune(weight, inputs, pattern, name)


@contextmanager
def own_weights(lm: nn.Module, layers: Iterable[Layer]) -> Iterator[None]:
    """Have layers compute with copies of their weights, which can be changed, afterwards with their own again."""
    parameters = {layer.parameter: lm.get_parameter(layer.parameter) for layer in layers}
    originals = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = originals[name].clone()
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = originals[name]


def write_result(lm: nn.Module, layer: Layer, result: LayerResult) -> None:
    """Have a layer compute with what a method made of its weight."""
    weight = layer.of(lm)
    if result.weight is None:
        weight.masked_fill_(~result.mask, 0)
    else:
        weight.copy_(result.weight)
