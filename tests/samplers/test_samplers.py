from functools import partial
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from helpers.sampler_truth import both_passes, normal, relative
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import (
    Categorical,
    Draw,
    GumbelSubset,
    GumbelTopK,
    PerWeightSampler,
    StraightThrough,
    on_device,
    relaxation,
    relaxed_top_n,
)
from roi_lightning.samplers.soft_masks import recursive_mask

PATTERNS = ["1:2", "1:4", "2:4", "3:4", "2:8", "4:8", "8:16"]
TEMPERATURES = [
    (1.0, 1.0),
    (0.3, 0.5),
    (0.1, 0.3),
    (0.02, 0.1),
    (0.005, 0.2),
    (0.002, 0.05),
    (0.002, 1.0),
    (1.0, 0.05),
]
END = (0.002, 0.05)  # of the paper's schedule


def reference(sampler, weight, upstream, logits, pattern, draw, dtype=torch.float64):
    """Both passes through plain autograd."""
    noise, logits = draw.noise_like(logits, pattern).to(dtype), logits.to(dtype).requires_grad_()
    groups = pattern.group(logits), pattern.group(noise)
    mask = relaxed_top_n(*groups, pattern.n, draw.lam, draw.tau, sampler.push_down)
    out = mask.flatten(-2) * weight.to(dtype)
    (grad,) = torch.autograd.grad(out, logits, upstream.to(dtype))
    return out.detach(), grad


def with_gradient(form, keys, grad):
    """A mask of keys, and the gradient of <mask, grad> with respect to the keys."""
    keys = keys.clone().requires_grad_()
    mask = form(keys)
    return mask.detach(), *torch.autograd.grad(mask, keys, grad)


@pytest.mark.parametrize("spec", PATTERNS)
@pytest.mark.parametrize("std", [0.01, 0.3, 3.0])
def test_mask_sums_to_n_at_every_temperature(spec, std):
    pattern = NMPattern(spec)
    ones, logits, upstream = torch.ones(32, 128), normal(32, 128, std=std), normal(32, 128, seed=1)
    for lam, tau in TEMPERATURES:
        for push_down in ("paper", "scaled"):
            draw = Draw.of(1, 2, "layer", lam, tau)
            mask, grad = both_passes(GumbelTopK(push_down), ones, upstream, logits, pattern, draw)
            where = f"λ {lam}, τ {tau}, {push_down}"
            assert mask.isfinite().all(), where
            assert grad.isfinite().all(), where
            assert mask.min() >= 0, where
            sums = mask.double().view(-1, pattern.m).sum(-1)
            assert (sums - pattern.n).abs().max() <= 1e-5, where
            if pattern.n <= 2 and push_down == "paper":
                # Keys of thousands are known to fp32's spacing only, and a tie at the bound shifts with it.
                spacing = torch.finfo(torch.float32).eps * logits.abs().max() / lam
                assert mask.max() <= 1.5 + 1e-5 + spacing / tau, where


@pytest.mark.parametrize("spec", PATTERNS)
def test_tied_and_hopelessly_led_groups_stay_finite(spec):
    pattern = NMPattern(spec)
    keys = torch.zeros(4, pattern.m, dtype=torch.float32)
    keys[1, 0] = 1e5
    keys[2] = torch.linspace(0, 3e4, pattern.m)
    keys[3, : pattern.n] = 1e4
    grad = normal(4, pattern.m)
    for tau in (1.0, 0.05):
        for push in (1.0, 1 / tau):
            form = partial(recursive_mask, n=pattern.n, tau=tau, push=push)
            mask, of_keys = with_gradient(form, keys.T, grad.T)
            assert mask.sum(0).tolist() == pytest.approx([pattern.n] * 4, abs=1e-5)
            assert of_keys.isfinite().all()


@pytest.mark.parametrize("push_down", ["paper", "scaled"])
@pytest.mark.parametrize("spec", PATTERNS)
def test_equals_autograd_through_the_reference(spec, push_down, monkeypatch):
    monkeypatch.setattr(relaxation, "_CPU_CHUNK", 1 << 10)
    pattern, shape, sampler = NMPattern(spec), (48, 64), GumbelTopK(push_down)
    weight, upstream = normal(*shape, seed=3), normal(*shape, seed=4)
    for lam, tau, std in [(1, 1, 1), (0.1, 0.3, 0.1), (0.01, 0.1, 0.05), (*END, 0.01)]:
        job = weight, upstream, normal(*shape, std=std), pattern, Draw.of(5, 6, "a.b", lam, tau)
        exact, single = reference(sampler, *job), reference(sampler, *job, torch.float32)
        found = both_passes(sampler, *job)
        for ours, plain, true in zip(found, single, exact, strict=True):
            assert ours.dtype == torch.float32
            # Cold temperatures magnify the rounding of fp32; it may cost autograd's own error, not much more.
            allowed = 1e-5 if lam >= 0.1 else 1e-5 + 5 * relative(plain, true)
            assert relative(ours, true) < allowed, f"λ {lam}, τ {tau}"


@pytest.mark.parametrize("spec", PATTERNS)
def test_unrolled_form_is_the_reference_in_double_precision(spec):
    pattern = NMPattern(spec)
    upstream = normal(500, pattern.m, seed=1).double()
    noise = Draw.of(1, 1, "layer", 1, 1).noise_like(upstream, pattern).double()
    for lam, tau in TEMPERATURES:
        for push_down, push in (("paper", 1.0), ("scaled", 1 / tau)):
            logits = normal(500, pattern.m, std=0.3).double().requires_grad_()
            mask = relaxed_top_n(logits, noise, pattern.n, lam, tau, push_down)
            (grad,) = torch.autograd.grad(mask, logits, upstream)
            keys = (logits.detach() / lam + noise).T
            form = partial(recursive_mask, n=pattern.n, tau=tau, push=push)
            found, found_grad = with_gradient(form, keys, upstream.T)
            where = f"λ {lam}, τ {tau}, {push_down}"
            assert relative(found.T, mask.detach()) < 1e-7, where
            assert relative(found_grad.T / lam, grad) < 1e-7, where


def test_a_lead_counts_in_the_gradient_however_large_it_is():
    # At τ = 1 the leader is pushed down by its lead over the others together: it is level with them in the second
    # pick, and stays so when it moves.
    keys, grad = torch.tensor([[45.0], [0.0], [-0.3], [-2.0]]), normal(4, 1)
    exact = with_gradient(
        lambda keys: relaxed_top_n(keys.T, torch.zeros_like(keys.T), 2, 1.0, 1.0).T, keys.double(), grad
    )
    for dtype in (torch.float32, torch.float64):
        form = partial(recursive_mask, n=2, tau=1.0, push=1.0)
        for ours, true in zip(with_gradient(form, keys.to(dtype), grad.to(dtype)), exact, strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sampler", [GumbelTopK(), GumbelTopK("scaled"), StraightThrough()])
def test_size_of_chunks_changes_no_bit(sampler, monkeypatch):
    pattern, results = NMPattern("4:8"), []
    logits, weight, draw = normal(72, 64, std=0.3), normal(72, 64, seed=1), Draw.of(0, 0, "layer", 0.1, 0.3)
    for size in (1 << 18, 1 << 10, 3000, 1 << 12):
        monkeypatch.setattr(relaxation, "_CPU_CHUNK", size)
        results.append(both_passes(sampler, weight, weight, logits, pattern, draw))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


def subset_probabilities(weights: list[float], n: int) -> dict[int, float]:
    """Chance of each set of n, drawn one after another without replacement in proportion to the weights."""
    chances = {}
    for subset in combinations(range(len(weights)), n):
        chance = 0.0
        for order in permutations(subset):
            left, product = sum(weights), 1.0
            for member in order:
                product *= weights[member] / left
                left -= weights[member]
            chance += product
        chances[sum(1 << member for member in subset)] = chance
    assert sum(chances.values()) == pytest.approx(1)
    return chances


@pytest.mark.parametrize(
    ("spec", "lam"), [("2:4", 0.3), ("2:4", 1.0), ("1:4", 0.3), ("3:4", 0.5), ("4:8", 0.5)]
)
def test_hard_masks_come_with_the_exact_probabilities(spec, lam):
    pattern, rows = NMPattern(spec), 200_000
    phi = normal(pattern.m, std=0.3, seed=9)
    drawn = StraightThrough().masked_weight(
        torch.ones(rows, pattern.m), phi.expand(rows, -1), pattern, Draw.of(11, 0, "layer", lam, 1.0)
    )
    counts = drawn.long().mul(2 ** torch.arange(pattern.m)).sum(-1).bincount(minlength=1 << pattern.m)
    exact = subset_probabilities((phi.double() / lam).exp().tolist(), pattern.n)
    assert counts[list(exact)].sum() == rows
    expected = rows * torch.tensor(list(exact.values()), dtype=torch.float64)
    assert expected.min() > 10
    chi2 = ((counts[list(exact)] - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor((len(exact) - 1) / 2).double(), chi2 / 2) > 1e-4


@pytest.mark.parametrize("push_down", ["paper", "scaled"])
@pytest.mark.parametrize("spec", [*PATTERNS, "64:257"])
def test_straight_through_is_hard_forward_soft_backward(spec, push_down):
    pattern, draw = NMPattern(spec), Draw.of(1, 1, "layer", 0.05, 0.2)
    shape = (32, 32) if pattern.m <= 32 else (8, pattern.m)
    logits, weight, upstream = normal(*shape, std=0.1), normal(*shape, seed=1), normal(*shape, seed=2)
    job = weight, upstream, logits, pattern, draw
    hard, hard_grad = both_passes(StraightThrough(push_down), *job)
    _, soft_grad = both_passes(GumbelTopK(push_down), *job)
    keys = logits / draw.lam + draw.noise_like(logits, pattern)
    kept = pattern.group(keys).argsort(-1, descending=True)[..., : pattern.n]
    mask = torch.zeros((*kept.shape[:-1], pattern.m)).scatter(-1, kept, 1.0).flatten(-2)
    assert pattern.holds(hard != 0)
    assert torch.equal(hard, weight * mask)
    assert torch.equal(hard_grad, soft_grad)
    assert hard_grad.abs().max() > 0


@pytest.mark.parametrize("sampler", [GumbelTopK(), StraightThrough()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_kept_for_backward_but_weight_and_logits(sampler, dtype):
    weight, logits, kept = normal(64, 64).to(dtype), normal(64, 64).requires_grad_(), []

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sampler.masked_weight(weight, logits, NMPattern("2:4"), Draw.of(0, 0, "layer", 0.1, 0.3))
    assert kept
    assert set(kept) <= {weight.untyped_storage().data_ptr(), logits.untyped_storage().data_ptr()}


def test_numbers_on_a_device_are_those_of_the_draws():
    draws = [Draw.of(1, index, name, 0.3 / (index + 1), 0.5) for index in range(2) for name in "ab"]
    placed = on_device(draws, torch.device("cpu"))
    assert placed == draws
    for draw in placed:
        assert draw.numbers.dtype == torch.int32
        assert tuple(draw.numbers[:2].tolist()) == draw.key
        inverse = draw.numbers[2:].view(torch.float32).tolist()
        assert inverse == pytest.approx([1 / draw.lam, 1 / draw.tau])


def literal(logits: Tensor, noise: Tensor, n: int, lam: float, tau: float, push_down: str) -> Tensor:
    """Equations 5 to 7 as printed; in double precision, where 1 - μ stays above zero while it is warm."""
    alpha, mask = logits / lam + noise, torch.zeros_like(logits)
    for _ in range(n):
        mu = torch.exp(alpha / tau) / torch.exp(alpha / tau).sum(-1, keepdim=True)
        mask = mask + mu
        alpha = alpha + torch.log(1 - mu) / (1 if push_down == "paper" else tau)
    return mask


@pytest.mark.parametrize("push_down", ["paper", "scaled"])
@pytest.mark.parametrize("spec", PATTERNS)
def test_the_reference_is_the_literal_recursion_where_that_is_finite(spec, push_down):
    pattern = NMPattern(spec)
    upstream = normal(300, pattern.m, seed=1).double()
    noise = Draw.of(2, 3, "layer", 1, 1).noise_like(upstream, pattern).double()
    for lam, tau in [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (0.5, 0.7)]:
        logits = normal(300, pattern.m, std=0.3).double().requires_grad_()
        found, expected = (
            (mask.detach(), *torch.autograd.grad(mask, logits, upstream))
            for mask in (
                form(logits, noise, pattern.n, lam, tau, push_down) for form in (relaxed_top_n, literal)
            )
        )
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


SHIPPED = [GumbelTopK(), StraightThrough(), GumbelSubset(), Categorical()]


@pytest.mark.parametrize("sampler", SHIPPED, ids=str)
def test_masked_weights_are_what_is_filled_with_the_same_gradient(sampler):
    pattern, draw, upstream = NMPattern("2:4"), Draw.of(0, 0, "layer", 0.1, 0.3), normal(4, 8, 16, seed=1)
    weight = normal(4, 8, 16).transpose(1, 2)  # any layout
    logits = normal(*sampler.logits_shape((4, 16, 8), pattern), std=0.1).requires_grad_()
    out = sampler.masked_weight(weight, logits, pattern, draw)
    out.backward(upstream.transpose(1, 2))
    job = logits.detach(), pattern, draw
    expected = both_passes(sampler, weight.contiguous(), upstream.transpose(1, 2), *job)
    assert torch.equal(out.detach(), expected[0])
    assert torch.equal(logits.grad, expected[1])


class Independent(PerWeightSampler):
    """A sampler as one first writes it: `masked_weight`, and autograd for the rest."""

    method = "independent"
    rows = slice(None)

    def masked_weight(self, weight, logits, pattern, draw):
        keys = logits / draw.lam + draw.noise_like(logits, pattern)
        soft = pattern.n * (pattern.group(keys) / draw.tau).softmax(-1).flatten(-2)
        return (weight * soft).to(weight.dtype)[self.rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sampler_of_one_s_own_fills_and_has_autograd_s_gradient(dtype):
    sampler, pattern, draw = Independent(), NMPattern("2:4"), Draw.of(0, 0, "layer", 0.1, 0.3)
    weight, upstream = (normal(6, 8, seed=seed).to(dtype) for seed in (0, 1))
    logits = normal(6, 8, std=0.1).requires_grad_()
    out = sampler.masked_weight(weight, logits, pattern, draw)
    out.backward(upstream)
    found = both_passes(sampler, weight, upstream, logits.detach(), pattern, draw)
    assert torch.equal(found[0], out.detach())
    assert torch.equal(found[1], logits.grad)
    assert found[1].dtype == torch.float32


def test_a_sampler_that_gives_another_shape_is_named():
    sampler, zeros = Independent(), torch.zeros(4, 8)
    sampler.rows = slice(1)
    with pytest.raises(UserError, match=r"Independent\.masked_weight made \[1, 8\] of .* \[4, 8\]"):
        both_passes(sampler, zeros, zeros, zeros, NMPattern("2:4"), Draw.of(0, 0, "layer", 1.0, 1.0))


class Half(GumbelTopK):
    """A sampler that changes what another draws."""

    def masked_weight(self, *args):
        return super().masked_weight(*args) / 2


def test_a_masked_weight_of_one_s_own_is_what_is_filled():
    pattern, draw = NMPattern("2:4"), Draw.of(0, 0, "layer", 0.1, 0.3)
    job = normal(6, 8), normal(6, 8, seed=1), normal(6, 8, std=0.1), pattern, draw
    for half, whole in zip(both_passes(Half(), *job), both_passes(GumbelTopK(), *job), strict=True):
        torch.testing.assert_close(2 * half, whole)
