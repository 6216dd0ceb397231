"""Choose the order of a model's hidden channels by what its layers receive from calibration text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.contrib.permute.channels import Channels
from roi_lightning.contrib.permute.grouping import group_columns, kept_score
from roi_lightning.contrib.permute.permutation import ChannelOrder
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.oneshot.calibration_statistics import InputNormObserver, exact_products
from roi_lightning.oneshot.pipeline import observed
from roi_lightning.utils.progress import progress

# Of the windows on which a permuted model is compared with its base.
_COMPARED: Final = (4, 128)


@dataclass(frozen=True)
class KeptScore:
    """What N:M keeps of a layer's scores, before its inputs are reordered and after.

    Attributes:
        layer: Its dotted name.
        total: The sum of all scores.
        before: Of those kept.
        after: Likewise.
    """

    layer: str
    total: float
    before: float
    after: float


@torch.no_grad()
def reorder_channels(
    lm: PreTrainedModel, channels: Sequence[Channels], pattern: NMPattern, windows: Tensor
) -> tuple[dict[str, ChannelOrder], list[KeptScore]]:
    """Choose the order of channels that keeps the most of weight² × ‖input‖², summed over each consumer.

    That is the squared error of the layer's output if its inputs were uncorrelated. Inputs are the dense model's.

    Args:
        lm: The model, on one device; unchanged.
        channels: Of it.
        pattern: N:M.
        windows: Token ids, int64 [count, seq_len].

    Returns:
        The orders by parameter, and a row for each consumer.

    Raises:
        UserError: If a layer receives no token or infinite ones.
    """
    prunable = prunable_layers(lm)
    layers = {each.consumer: prunable[each.consumer] for each in channels}
    observers = observed(lm, layers, InputNormObserver, windows)
    orders: dict[str, ChannelOrder] = {}
    rows: list[KeptScore] = []
    for each in progress(channels, "reordering channels"):
        layer, inputs = layers[each.consumer], observers.of(each.consumer, layers[each.consumer])
        inputs.check(each.consumer)
        scores = layer.of(lm).float().square() * inputs.total
        order = torch.stack([group_columns(x, pattern) for x in _heads(scores, each)])
        found = each.orders(lm, order)
        index = found[f"{each.consumer}.weight"].indices.to(scores.device)
        kept = (kept_score(x, pattern) for x in (scores, scores[:, index]))
        rows.append(KeptScore(each.consumer, float(scores.sum(dtype=torch.float64)), *kept))
        orders |= found
    return orders, rows


def _heads(scores: Tensor, channels: Channels) -> Iterable[Tensor]:
    """The scores [rows, inputs] by head, [rows × repeats, size] each."""
    split = scores.view(len(scores), channels.heads, channels.repeats, channels.size)
    return split.permute(1, 0, 2, 3).flatten(1, 2)


@torch.no_grad()
def compared_logits(lm: PreTrainedModel, windows: Tensor) -> Tensor:
    """The logits of the beginning of a few windows, fp32 on the CPU, in full precision of products.

    Args:
        lm: The model, in fp32.
        windows: Token ids, int64 [count, seq_len].
    """
    count, length = _COMPARED
    with exact_products():
        logits: Tensor = lm(input_ids=windows[:count, :length].to(lm.device), use_cache=False).logits
    return logits.float().cpu()
