"""The relaxation over whole masks, against its definition, RoI's recursion and the masks that it stands for."""

from dataclasses import replace

import pytest
import torch

from helpers.sampler_truth import both_passes, exactly, relative, tensors
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Draw, GumbelSubset, GumbelTopK, StraightThrough

SHAPE = 24, 48
WARM, COLD = (Draw.of(3, 7, "layer", *temperatures) for temperatures in ((0.3, 0.5), (0.002, 0.05)))


def drawn(sampler, spec, draw, ones=False):
    """Drawn weight and the logits' gradient."""
    weight, upstream, logits = tensors(sampler, spec, shape=SHAPE)
    weight = torch.ones_like(weight) if ones else weight
    return both_passes(sampler, weight, upstream, logits, NMPattern(spec), draw)


@pytest.mark.parametrize("spec", ["1:4", "2:4", "3:4", "2:8", "4:8"])
def test_equals_autograd_through_the_definition(spec):
    for ours, true in zip(
        drawn(GumbelSubset(), spec, WARM), exactly(GumbelSubset(), spec, WARM, shape=SHAPE), strict=True
    ):
        assert relative(ours, true) < 1e-5


@pytest.mark.parametrize("spec", ["2:4", "2:8"])
def test_cold_masks_are_the_hard_ones_of_roi(spec):
    soft, _ = drawn(GumbelSubset(), spec, replace(COLD, tau=1e-3), ones=True)
    hard, _ = drawn(StraightThrough(), spec, COLD, ones=True)
    assert (soft.round() == hard).float().mean() > 0.999


def test_a_decided_mask_is_kept_whole_at_a_high_temperature():
    pattern, ones = NMPattern("2:4"), torch.ones(64, 64)
    phi = torch.tensor([0.1, 0.1, -0.1, -0.1]).repeat(64, 16)

    def distance(sampler):
        mask = sampler.masked_weight(ones, phi, pattern, Draw.of(0, 0, "layer", 0.01, 1.0))
        return float((mask - (phi > 0).float()).norm())

    assert distance(GumbelSubset()) < 0.01 * distance(GumbelTopK())


def test_too_many_candidates_are_refused():
    with pytest.raises(UserError, match=r"8:16 has 12,870 candidate masks.*use GumbelTopK"):
        GumbelSubset().logits_shape((16, 16), NMPattern("8:16"))
