"""The policy gradient's ∇ log p, against all ordered draws without replacement, one by one."""

from itertools import permutations

import pytest
import torch

from roi_lightning.contrib.maskpro.log_probability import log_probability_gradient
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Draw, StraightThrough
from roi_lightning.samplers.noise import noise_key, uniform

LAYER = "a.layer"


def ordered_draws(logits, n):
    """Every ordered draw of n elements, and its probability: pick by pick, each from what is left. float64."""
    chance = {}
    for order in permutations(range(len(logits)), n):
        p, left = torch.ones((), dtype=torch.float64), list(range(len(logits)))
        for element in order:
            p = p * logits[left].softmax(0)[left.index(element)]
            left.remove(element)
        chance[order] = p
    assert sum(p.item() for p in chance.values()) == pytest.approx(1)
    return chance


def gradient(logits, spec, draw):
    return log_probability_gradient(logits, NMPattern(spec), draw)


@pytest.mark.parametrize("spec", ["1:2", "1:4", "2:4", "3:5", "2:8"])
def test_the_gradient_is_that_of_the_ordered_draws_exact_probability(spec):
    pattern, draw = NMPattern(spec), Draw.of(3, 7, LAYER, 1.0, 1.0)
    logits = 2 * torch.randn((5, 3 * pattern.m), generator=torch.Generator().manual_seed(1))
    found = gradient(logits, spec, draw).view(-1, pattern.m)
    index = torch.arange(logits.numel(), dtype=torch.int32)
    noise = -torch.log(-torch.log(uniform(index, noise_key(3, 7, LAYER)).double()))
    masks = StraightThrough().masked_weight(torch.ones_like(logits), logits, pattern, draw)
    groups = logits.double().view(-1, pattern.m)
    for group, (own, g) in enumerate(zip(groups, noise.view(-1, pattern.m), strict=True)):
        order = tuple(sorted(range(pattern.m), key=(own + g).tolist().__getitem__, reverse=True)[: pattern.n])
        own.requires_grad_()
        (wanted,) = torch.autograd.grad(ordered_draws(own, pattern.n)[order].log(), own)
        torch.testing.assert_close(found[group].double(), wanted, rtol=0, atol=1e-5)
        used = masks.view(-1, pattern.m)[group].nonzero().flatten().tolist()
        assert sorted(order) == used, "of the mask that a forward pass uses"


def test_logits_far_apart_have_a_finite_gradient():
    logits = torch.tensor([[500.0, 200.0, -300.0, -500.0, 0.0, 1e-3, -1e4, 1e4]])
    found = gradient(logits, "2:4", Draw.of(0, 0, LAYER, 1.0, 1.0))
    assert found.isfinite().all()
    assert found.view(2, 4).sum(1) == pytest.approx([0, 0], abs=1e-6)
    assert found[0, :4] == pytest.approx([0, 0, 0, 0])
