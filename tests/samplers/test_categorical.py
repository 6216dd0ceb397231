"""MaskLLM's sampler against a literal softmax over enumerated candidates."""

import pytest
import torch

from helpers.sampler_truth import both_passes, candidate_masks, exact_mask, normal, relative
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, relaxation

PATTERNS = ["1:2", "1:4", "2:4", "3:4", "2:8", "4:8"]
# λ = 1/κ and τ at the start, in the middle and at the end of MaskLLM's schedule, and hot ones.
TEMPERATURES = [(1.0, 1.0), (1 / 100, 4.0), (1 / 300, 2.0), (1 / 500, 0.05)]


def new_logits(shape, pattern, std=0.01, seed=0):
    return normal(*Categorical().logits_shape(shape, pattern), std=std, seed=seed)


@pytest.mark.parametrize("spec", PATTERNS)
def test_equals_autograd_through_a_literal_softmax(spec, monkeypatch):
    monkeypatch.setattr(relaxation, "_CPU_CHUNK", 1000)
    pattern, shape = NMPattern(spec), (48, 64)
    weight, upstream = normal(*shape, seed=3), normal(*shape, seed=4)
    for lam, tau in TEMPERATURES:
        draw, logits = Draw.of(5, 6, "layer", lam, tau), new_logits(shape, pattern).requires_grad_()
        wanted = exact_mask(Categorical(), logits.double(), pattern, draw) * weight.double()
        (gradient,) = torch.autograd.grad(wanted, logits, upstream.double())
        found = both_passes(Categorical(), weight, upstream, logits.detach(), pattern, draw)
        assert found[0].dtype == found[1].dtype == torch.float32
        assert found[1].shape == logits.shape
        # A key of 17 is known to 2e-6, which τ divides.
        allowed = 1e-6 + 4e-6 / tau
        assert relative(found[0], wanted.detach()) < allowed, f"λ {lam}, τ {tau}"
        assert relative(found[1], gradient) < allowed, f"λ {lam}, τ {tau}"


@pytest.mark.parametrize("spec", PATTERNS)
def test_masks_are_mixtures_at_every_temperature(spec):
    pattern = NMPattern(spec)
    for std in (0.01, 1.0, 30.0):
        logits = new_logits((32, 64), pattern, std)
        for lam, tau in TEMPERATURES:
            job = torch.ones(32, 64), normal(32, 64), logits, pattern, Draw.of(1, 2, "layer", lam, tau)
            mask, grad = both_passes(Categorical(), *job)
            sums = pattern.group(mask.double()).sum(-1)
            assert (sums - pattern.n).abs().max() < 1e-5
            assert mask.max() <= 1 + 1e-6
            # Nowhere near the denormal numbers, however hopeless a member.
            assert mask.min() > 1e-13
            assert grad.isfinite().all()


@pytest.mark.parametrize("lam", [0.02, 0.01])
@pytest.mark.parametrize("spec", ["1:4", "2:4", "2:8", "4:8"])
def test_hard_draws_come_with_the_softmax_of_the_scaled_logits(spec, lam):
    pattern, rows = NMPattern(spec), 100_000
    masks = candidate_masks(pattern)
    phi = normal(len(masks), std=0.01, seed=9)
    drawn = Categorical(compiled=False).masked_weight(
        torch.ones(rows, pattern.m),
        phi.view(-1, 1, 1).expand(-1, rows, 1),
        pattern,
        Draw.of(11, 0, "layer", lam, 1e-6),
    )
    settled = (drawn - drawn.round()).abs().amax(-1) < 1e-6
    assert settled.double().mean() > 0.999
    powers = 2 ** torch.arange(pattern.m)
    counts = drawn[settled].round().long().mul(powers).sum(-1).bincount(minlength=1 << pattern.m)
    counts = counts[masks.long().mul(powers).sum(-1)]
    assert counts.sum() == settled.sum()
    expected = settled.sum() * (phi.double() / lam).softmax(0)
    assert expected.min() > 10
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor((len(masks) - 1) / 2).double(), chi2 / 2) > 1e-4


@pytest.mark.parametrize("spec", PATTERNS)
def test_final_mask_is_the_candidate_of_the_largest_logit(spec):
    pattern = NMPattern(spec)
    logits = new_logits((16, 32), pattern, std=1.0).round()  # ties abound
    found = Categorical().hard_mask(logits.clone().requires_grad_(), pattern)
    candidates = candidate_masks(pattern).bool().tolist()
    rows = logits.movedim(0, -1)
    best = [
        max(range(len(candidates)), key=lambda c: (group[c], -c)) for group in rows.flatten(0, 1).tolist()
    ]
    wanted = torch.tensor([candidates[c] for c in best]).view(*rows.shape[:2], pattern.m)
    assert torch.equal(found, wanted.flatten(1))
    assert pattern.holds(found)


@pytest.mark.parametrize("spec", ["1:4", "2:4", "4:8"])
def test_prior_moves_logits_as_in_maskllm(spec):
    pattern, shape, sampler = NMPattern(spec), (16, 32), Categorical()
    noise, mask = new_logits(shape, pattern, std=0.01), NMPattern(spec).top(normal(*shape, seed=1))
    assert torch.equal(sampler.initial_logits(noise, None, 0.015, pattern), noise)
    assert torch.equal(sampler.initial_logits(noise, mask, 0.0, pattern), noise)
    before = noise.clone()
    mask = mask.T.contiguous().T  # as priors may come
    moved = sampler.initial_logits(noise, mask, 0.015, pattern) - noise
    assert torch.equal(noise, before)
    alpha, sigma = 3.0, 0.01
    grouped = mask.double().unflatten(1, (-1, pattern.m))
    overlap = (grouped @ candidate_masks(pattern).T).movedim(-1, 0)
    torch.testing.assert_close(
        moved.double(), (overlap - pattern.n / 2) * sigma * alpha, rtol=1e-5, atol=1e-8
    )
    strong = sampler.initial_logits(noise, mask, 1.0, pattern)
    assert torch.equal(sampler.hard_mask(strong, pattern), mask)


def test_choices_are_the_candidates_and_one_is_picked():
    pattern = NMPattern("2:4")
    logits = new_logits((32, 32), pattern)
    best = Categorical().choices(logits, pattern).argmax(-1)
    mask = candidate_masks(pattern)[best].bool().flatten(1)
    assert torch.equal(mask, Categorical().hard_mask(logits, pattern))
    assert Categorical().picks(pattern) == 1
    assert GumbelTopK().picks(pattern) == 2
    logits = normal(32, 32)
    assert torch.equal(GumbelTopK().choices(logits, pattern), logits.view(32, 8, 4))


def test_too_many_candidates_are_refused():
    with pytest.raises(
        UserError, match=r"9:18 has 48,620 candidate masks.*20,000.*GumbelTopK, which needs only 18"
    ):
        Categorical().logits_shape((36, 36), NMPattern("9:18"))
