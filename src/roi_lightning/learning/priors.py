"""Masks known before training, from which the logits start.

A prior is given one layer at a time, so that no more than one boolean mask is alive at once.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Sampler

if TYPE_CHECKING:
    from roi_lightning.oneshot import Activations, OneShotMethod

NAMED_PRIORS: Final = ("none", "magnitude", "activation", "wanda", "sparsegpt")
MEASURED_PRIORS: Final = NAMED_PRIORS[2:]  # on text
SEQUENTIAL_PRIORS: Final = NAMED_PRIORS[3:]  # a block on what the pruned ones before it give
_DRAWN: Final = 1 << 20  # logits, for an error of a tenth of a percent at 2:4


@cache
def one_shot_priors() -> dict[str, tuple["OneShotMethod", "Activations"]]:
    """The methods of the named priors.

    They give masks alone: the weights to learn on are the base's, so later blocks receive what those give too.
    """
    from roi_lightning.oneshot import Magnitude, SparseGPT, Wanda

    return {
        "magnitude": (Magnitude(), "dense"),
        "activation": (Wanda(), "dense"),
        "wanda": (Wanda(), "sequential"),
        "sparsegpt": (SparseGPT(update_weights=False), "sequential"),
    }


def check_prior(prior: str) -> None:
    """Refuse a prior that is neither a known name nor an existing mask file or exported directory.

    Raises:
        UserError: Naming the value and the choices.
    """
    if prior not in NAMED_PRIORS and not Path(prior).expanduser().exists():
        raise UserError(
            f"model.prior {prior!r} is none of {', '.join(NAMED_PRIORS)} and no mask file is there; choose one"
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
    groups = max(1, _DRAWN // math.prod(sampler.logits_shape((1, pattern.m), pattern)))
    prior = (torch.arange(pattern.m) < pattern.n).expand(groups, -1)
    noise = torch.randn(sampler.logits_shape((groups, pattern.m), pattern), generator=generator)
    logits = sampler.initial_logits(noise * init_std, prior, strength, pattern)
    gumbel = -torch.rand(logits.shape, generator=generator).log_().neg_().log_()
    drawn = sampler.hard_mask(logits / lam + gumbel, pattern)
    return float((drawn & prior).sum() / prior.sum())


def file_masks(masks: MaskSet, stored: Mapping[str, str], pattern: Pattern) -> Iterator[tuple[str, Tensor]]:
    """The masks of a mask file.

    Args:
        masks: A loaded mask set that fits the base model.
        stored: Layer name → name of its weight on disk.
        pattern: Of the run, for all layers or for each.

    Yields:
        Layer name and boolean mask [out, in].

    Raises:
        UserError: If the file has another pattern for a layer, or lacks it.
    """
    for name, stored_name in stored.items():
        if stored_name not in masks.layers:
            raise UserError(f"the prior's mask file has no mask for {stored_name!r}; leave it out (ignore)")
        own, wanted = masks.pattern.of(stored_name), pattern.of(name)
        if own != wanted:
            raise UserError(
                f"the prior's mask file has {stored_name!r} at {own} and the run at {wanted}; give the patterns it "
                "was made with or another mask"
            )
        yield name, masks.layers[stored_name].to_rows()
