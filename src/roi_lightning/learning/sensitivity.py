"""What pruning one layer alone costs: the divergence of the model's next-token distribution from the dense one's."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.learning.losses import kl_sum
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import input_dim
from roi_lightning.oneshot import Calibration, LayerResult, Wanda, prune_layers
from roi_lightning.oneshot.block_runner import BlockRunner
from roi_lightning.oneshot.pipeline import replaced
from roi_lightning.utils.progress import Advance

Costs = dict[str, dict[NMPattern, float]]


@torch.no_grad()
def layer_costs(
    lm: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    choices: Mapping[str, Sequence[NMPattern]],
    windows: Tensor,
) -> Costs:
    """Measure every layer at every pattern, all other layers dense, by forward passes.

    A layer is put under its Wanda mask on the dense model's activations. What comes before its block is run once.

    Args:
        lm: The model, all of it on one device; it stays as it is.
        layers: Linear layers inside its blocks, by dotted name.
        choices: The patterns to try, by layer.
        windows: Token ids, int64 [count, seq_len]; for the masks and for the divergence.

    Returns:
        KL(dense ‖ pruned) in nats per predicted token, by layer and pattern.

    Raises:
        UserError: If the model's layout or its activations do not allow it.
    """
    device = next(lm.parameters()).device
    masks = _masks(lm, layers, choices, Calibration(windows, "dense", device))
    costs: Costs = {name: dict.fromkeys(patterns, 0.0) for name, patterns in choices.items()}
    predicted = windows[:, 1:].numel()
    report: Advance | None = None
    for i, window in enumerate(windows):
        blocks = BlockRunner(lm, window[None], device)
        dense = blocks.logits(0)
        passes = _passes(blocks, layers, choices)
        report = report or Advance(len(windows) * passes, "measuring layers, block by block")
        done = i * passes
        for index in range(len(blocks)):
            for name, pattern in _inside(blocks, index, layers, choices):
                mask = masks[name, pattern].to_bool().to(device)
                with replaced(layers[name], LayerResult(mask)):
                    divergence = kl_sum(blocks.logits(index), dense, window[None].to(device))
                costs[name][pattern] += float(divergence) / predicted
                done += len(blocks) - index
                report.go_to(done)
            blocks.run(index, keep=True)
    return costs


def _masks(
    lm: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    choices: Mapping[str, Sequence[NMPattern]],
    calibration: Calibration,
) -> dict[tuple[str, NMPattern], LayerMask]:
    masks = {}
    for pattern in sorted({pattern for own in choices.values() for pattern in own}, key=str):
        own = {name: layer for name, layer in layers.items() if pattern in choices[name]}
        for name, result in prune_layers(lm, own, Wanda(), pattern, calibration):
            masks[name, pattern] = LayerMask.from_bool(result.mask.cpu(), input_dim(layers[name]) == 0)
    return masks


def _inside(
    blocks: BlockRunner,
    index: int,
    layers: Mapping[str, nn.Module],
    choices: Mapping[str, Sequence[NMPattern]],
) -> Iterator[tuple[str, NMPattern]]:
    own = (name for name in layers if name.startswith(blocks.prefix(index)))
    return ((name, pattern) for name in own for pattern in choices[name])


def _passes(
    blocks: BlockRunner, layers: Mapping[str, nn.Module], choices: Mapping[str, Sequence[NMPattern]]
) -> int:
    """How often a block runs for a window."""
    counts = (len(list(_inside(blocks, index, layers, choices))) for index in range(len(blocks)))
    return sum(count * (len(blocks) - index) for index, count in enumerate(counts))
