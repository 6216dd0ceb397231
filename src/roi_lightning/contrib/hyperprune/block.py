"""A decoder block, as a method sees it that prunes by the block's output."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import Layer
from roi_lightning.oneshot.block_runner import BlockRunner
from roi_lightning.oneshot.calibration_statistics import InputObserver


@dataclass(frozen=True)
class BlockLayer:
    """A layer of a block that is to be pruned.

    Attributes:
        weight: [out, in], any float dtype.
        inputs: Sums over what it received.
        pattern: N:M along the inputs.
        kind: Its name in the block without numbers, the same in every block: `self_attn.q_proj`.
    """

    weight: Tensor
    inputs: InputObserver
    pattern: NMPattern
    kind: str


@dataclass(frozen=True)
class Block:
    """A decoder block on its device.

    Attributes:
        index: In the model, from 0.
        layers: To be pruned, by full name.
        windows: How many windows of calibration text there are.
        inputs: The hidden states [1, seq_len, hidden] that the block receives for a window, by its number.
        output: The block's output of the same shape for a window, differentiable in the weights [out, in] that take
            the place of its own, by full name.
    """

    index: int
    layers: Mapping[str, BlockLayer]
    windows: int
    inputs: Callable[[int], Tensor]
    output: Callable[[int, Mapping[str, Tensor]], Tensor]


def block_of(
    blocks: BlockRunner,
    index: int,
    layers: Mapping[str, Layer],
    inputs: Mapping[str, InputObserver],
    pattern: Pattern,
) -> Block:
    """A block as `CalibratedMethod.see_block` gets it.

    Raises:
        UserError: If a layer received infinite numbers.
    """
    prefix, members = blocks.prefix(index), dict[str, BlockLayer]()
    for name, layer in layers.items():
        inputs[name].check(name)
        kind = re.sub(r"\b\d+\.", "", name.removeprefix(prefix))
        members[name] = BlockLayer(layer.of(blocks.lm), inputs[name], pattern.of(name), kind)

    def output(window: int, weights: Mapping[str, Tensor]) -> Tensor:
        own: dict[str, Tensor] = {}
        for name, weight in weights.items():
            parameter = layers[name].parameter
            if parameter not in own:
                own[parameter] = blocks.lm.get_parameter(parameter).detach().clone()
            layers[name].view(own[parameter]).copy_(weight)
        return blocks.output(index, window, {name.removeprefix(prefix): x for name, x in own.items()})

    return Block(index, members, blocks.windows, blocks.hidden, output)
