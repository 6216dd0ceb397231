"""Masks known before training, from which the logits start.

A prior is given one layer at a time, so that no more than one boolean mask is alive at once.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.experts import tell_of_idle
from roi_lightning.masks import MaskSet
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import Sampler
from roi_lightning.shards import whole
from roi_lightning.sparse_linear import MaskedLinear

LAYERWISE_PRIORS: Final = ("wanda", "sparsegpt")
MEASURED_PRIORS: Final = ("activation", *LAYERWISE_PRIORS)
NAMED_PRIORS: Final = ("none", "magnitude", *MEASURED_PRIORS)
_DRAWN: Final = 1 << 20  # logits, for an error of a tenth of a percent at 2:4


def check_prior(prior: str) -> None:
    """Refuse a prior that is neither a known name nor an existing mask file or exported directory.

    Raises:
        UserError: Naming the value and the choices.
    """
    if prior not in NAMED_PRIORS and not Path(prior).expanduser().exists():
        raise UserError(
            f"model.prior {prior!r} is none of {', '.join(NAMED_PRIORS)} and no mask file is there; choose one"
        )


def check_prior_pattern(masks: MaskSet, pattern: NMPattern) -> None:
    """Refuse a prior's mask file of another pattern.

    Raises:
        UserError: Naming both.
    """
    if masks.pattern != pattern:
        raise UserError(
            f"the prior's mask file is {masks.pattern}, model.pattern is {pattern}; set that or give another mask"
        )


def share_kept_at_start(
    sampler: Sampler, pattern: NMPattern, strength: float, init_std: float, lam: float
) -> float:
    """How much of a prior the first draws keep, from 0 to 1: by hard draws of random groups, the same every time.

    Args:
        sampler: Whose logits start from the prior.
        pattern: The N:M pattern.
        strength: How far kept and pruned weights are pushed apart.
        init_std: Of the logits' random part.
        lam: The sampling temperature λ at the start.
    """
    generator = torch.Generator().manual_seed(0)
    groups = max(1, _DRAWN // math.prod(sampler.logits_shape((1, pattern.m), pattern, 1)))
    prior = (torch.arange(pattern.m) < pattern.n).expand(groups, -1)
    noise = torch.randn(sampler.logits_shape((groups, pattern.m), pattern, 1), generator=generator)
    logits = sampler.initial_logits(noise * init_std, prior, strength, pattern, 1)
    gumbel = -torch.empty_like(logits).exponential_(generator=generator).log_()
    drawn = sampler.hard_mask(logits / lam + gumbel, pattern, 1)
    return float((drawn & prior).sum() / prior.sum())


def magnitude_masks(layers: Mapping[str, MaskedLinear], pattern: NMPattern) -> Iterator[tuple[str, Tensor]]:
    """Keep the largest absolute weights of each group.

    Yields:
        Layer name and boolean mask of the weight's shape.
    """
    for name, layer in layers.items():
        yield name, pattern.top(whole(layer.weight.detach()).float().abs(), layer.dim)


def activation_masks(
    layers: Mapping[str, MaskedLinear], norms: Mapping[str, Tensor], pattern: NMPattern
) -> Iterator[tuple[str, Tensor]]:
    """Keep the weights with the largest |weight| times the norm of the input they meet (Wanda's score).

    Args:
        layers: The layers.
        norms: From `input_norms`; a layer without one is pruned by magnitude.
        pattern: The pattern.

    Yields:
        Layer name and boolean mask of the weight's shape.
    """
    for name, layer in layers.items():
        scores = whole(layer.weight.detach()).float().abs()
        if name in norms:
            scores = scores * (norms[name] if layer.dim == 1 else norms[name].unsqueeze(1))
        yield name, pattern.top(scores, layer.dim)


@torch.no_grad()
def input_norms(
    lm: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    windows: Tensor,
) -> dict[str, Tensor]:
    """Root of the summed squares of every layer's inputs over some text, the model run as it is.

    Args:
        lm: The model, its layers in the mode that should be measured (dense, for Wanda's prior).
        layers: Layers by name.
        windows: [count, seq_len] token ids.

    Returns:
        Layer name → fp32 [in]; without the layers of experts that no token was sent to, of which a warning tells.

    Raises:
        UserError: If another layer met no token.
    """
    sums: dict[str, Tensor] = {}

    def add(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            squares = inputs[0].detach().flatten(0, -2).float().square().sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    with ExitStack() as hooks:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(add(name))
            hooks.callback(handle.remove)
        device = next(lm.parameters()).device
        # A spread model gathers its embeddings only where it is called as a whole.
        run = lm if isinstance(lm, FSDPModule) else lm.base_model
        for window in windows:
            run(input_ids=window.unsqueeze(0).to(device), use_cache=False)
    tell_of_idle(lm, [name for name in layers if name not in sums])
    return {name: total.sqrt() for name, total in sums.items()}


def file_masks(masks: MaskSet, stored: Mapping[str, str], pattern: NMPattern) -> Iterator[tuple[str, Tensor]]:
    """The masks of a mask file.

    Args:
        masks: A loaded mask set that fits the base model.
        stored: Layer name → name of its weight on disk.
        pattern: The pattern of the run.

    Yields:
        Layer name and boolean mask of the weight's shape.

    Raises:
        UserError: If the file has another pattern or lacks a layer.
    """
    check_prior_pattern(masks, pattern)
    for name, stored_name in stored.items():
        if stored_name not in masks.layers:
            raise UserError(f"the prior's mask file has no mask for {stored_name!r}; leave it out (ignore)")
        yield name, masks.layers[stored_name].to_bool()
