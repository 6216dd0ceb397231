"""Hidden channels that can change places without changing what the model computes.

Those between the two layers of an MLP, and those between the value and the output projection inside each head: the
rows of the layers before them and the columns of the layer after them are reordered alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from roi_lightning.contrib.permute.permutation import ChannelOrder
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import BaseTensors
from roi_lightning.models.config import load_config
from roi_lightning.models.layers import Layer, prunable_layers, stored_names
from roi_lightning.models.loading import meta_language_model

# The layers before and after the channels of an MLP, by what families call them.
_MLPS: Final = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
_OUTPUTS: Final = ("o_proj", "out_proj")


@dataclass(frozen=True)
class Channels:
    """The hidden channels of one MLP, or of all value heads of one block.

    Attributes:
        producers: The layers that make the channels, by dotted name.
        consumer: The layer that reads them.
        heads: Within which the channels can change places; an MLP counts as one.
        size: Channels of a head.
        repeats: How many heads in a row of the consumer's inputs come from each (query heads of a key-value head).
    """

    producers: tuple[str, ...]
    consumer: str
    heads: int
    size: int
    repeats: int

    def orders(self, lm: nn.Module, order: Tensor) -> dict[str, ChannelOrder]:
        """The order of every parameter concerned.

        Args:
            lm: The model; shapes are enough.
            order: Of the channels of each head, int64 [heads, size].
        """
        rows = (order + torch.arange(self.heads)[:, None] * self.size).flatten()
        found: dict[str, ChannelOrder] = {}
        for name in self.producers:
            layer = lm.get_submodule(name)
            found[f"{name}.weight"] = ChannelOrder(1 - _input_dim(layer), rows)
            if getattr(layer, "bias", None) is not None:
                found[f"{name}.bias"] = ChannelOrder(0, rows)
        places = torch.arange(self.heads * self.repeats).view(self.heads, self.repeats, 1) * self.size
        columns = (places + order[:, None]).flatten()
        layer = lm.get_submodule(self.consumer)
        return found | {f"{self.consumer}.weight": ChannelOrder(_input_dim(layer), columns)}

    def order_of(self, columns: Tensor) -> Tensor:
        """The order of the channels of each head, int64 [heads, size], from that of the consumer's inputs.

        Raises:
            ValueError: If channels changed places between heads.
        """
        first = columns.view(self.heads, self.repeats, self.size)[:, 0]
        order = first - torch.arange(self.heads)[:, None] * self.repeats * self.size
        if not torch.equal(order.sort().values, torch.arange(self.size).expand(self.heads, -1)):
            raise ValueError(f"channels of {self.consumer} changed places between heads")
        return order


def find_channels(lm: PreTrainedModel, pattern: NMPattern) -> tuple[list[Channels], list[str]]:
    """The channels that can be reordered, and the modules with linear layers in which none were found.

    Args:
        lm: The model; shapes are enough.
        pattern: N:M; a head that M does not divide has groups in common with the next, and stays as it is.

    Returns:
        The channels in the model's order, and dotted names.
    """
    layers = prunable_layers(lm)
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in layers))
    found: list[Channels] = []
    left: list[str] = []
    for owner in owners:
        own = {name.rpartition(".")[2]: layers[name] for name in layers if name.rpartition(".")[0] == owner}
        is_expert = any(layer.expert is not None for layer in own.values())
        here = [] if is_expert else [*_of_mlp(owner, own), *_of_heads(lm, owner, own, pattern)]
        found += here
        if not here:
            left.append(owner)
    return found, left


def _of_mlp(owner: str, own: Mapping[str, Layer]) -> Iterator[Channels]:
    for producers, consumer in _MLPS:
        if {*producers, consumer} <= own.keys():
            _, size = own[consumer].shape
            if all(own[name].shape[0] == size for name in producers):
                yield Channels(tuple(f"{owner}.{x}" for x in producers), f"{owner}.{consumer}", 1, size, 1)
            return


def _of_heads(
    lm: PreTrainedModel, owner: str, own: Mapping[str, Layer], pattern: NMPattern
) -> Iterator[Channels]:
    consumer = next((name for name in _OUTPUTS if name in own), None)
    if "v_proj" not in own or consumer is None:
        return
    config = lm.config.get_text_config()
    size = getattr(lm.get_submodule(owner), "head_dim", None) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    values, inputs = own["v_proj"].shape[0], own[consumer].shape[1]
    if values % size == 0 and inputs % values == 0 and size % pattern.m == 0:
        yield Channels((f"{owner}.v_proj",), f"{owner}.{consumer}", values // size, size, inputs // values)


def _input_dim(layer: nn.Module) -> int:
    return 0 if isinstance(layer, Conv1D) else 1


def stored_orders(
    base: BaseTensors, lm: PreTrainedModel, orders: Mapping[str, ChannelOrder]
) -> dict[str, ChannelOrder]:
    """Orders by the names of the tensors on disk.

    Args:
        base: The model's tensors.
        lm: The model; shapes are enough.
        orders: By the names of its parameters.

    Raises:
        UserError: If a parameter is on disk under no known name.
    """
    if not base.source.is_stored:
        return dict(orders)
    return {stored: orders[name] for name, stored in stored_names(lm, orders, base.files).items()}


def consistent_orders(
    base: BaseTensors, pattern: NMPattern, orders: Mapping[str, ChannelOrder]
) -> dict[str, ChannelOrder]:
    """What all orders would have to be, if those of the consumers are right, for the model to compute the same.

    Args:
        base: The base model's tensors; its configuration says which belong together.
        pattern: N:M.
        orders: By names on disk.

    Raises:
        ValueError: If channels changed places between heads.
        UserError: If the configuration can't be read.
    """
    lm = meta_language_model(load_config(base.source))
    wanted: dict[str, ChannelOrder] = {}
    for channels in find_channels(lm, pattern)[0]:
        weight = f"{channels.consumer}.weight"
        identity = torch.arange(channels.size).expand(channels.heads, -1)
        names = stored_orders(base, lm, {weight: channels.orders(lm, identity)[weight]})
        if (stored := next(iter(names))) in orders:
            order = channels.order_of(orders[stored].indices)
            wanted |= stored_orders(base, lm, channels.orders(lm, order))
    return wanted
