import math
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from helpers.sampler_truth import normal, relative
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Draw, GumbelTopK, StraightThrough, eager, relaxed_top_n
from roi_lightning.samplers.base import Inputs
from roi_lightning.samplers.noise import gumbel

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


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Thousands of small operations: on a busy machine the threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise_of(shape: tuple[int, ...], draw: Draw) -> Tensor:
    index = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    return gumbel(index, draw.key)


def draw_at(lam: float, tau: float, index: int = 2, name: str = "a.b", seed: int = 1) -> Draw:
    return Draw.of(seed, index, name, lam, tau)


def relaxed(keys: Tensor, pattern: NMPattern, draw: Draw, scaled: bool, upstream: Tensor):
    """The fallback's mask of keys [M, groups], and their gradient."""
    keys = keys.clone().requires_grad_()
    mask = eager.relaxed_top_n(keys, Inputs(keys, keys, pattern, draw, scaled=scaled))
    return mask.detach(), torch.autograd.grad(mask, keys, upstream)[0]


def run(sampler, weight, logits, pattern, draw=None, upstream=None):
    """The masked weight and the logits' gradient."""
    logits = logits.clone().requires_grad_()
    out = sampler.masked_weight(weight, logits, pattern, draw or draw_at(0.1, 0.3))
    (grad,) = torch.autograd.grad(out, logits, torch.ones_like(out) if upstream is None else upstream)
    return out.detach(), grad


def reference(sampler, weight, logits, pattern, draw, upstream, dtype=torch.float64):
    """The same through plain autograd."""
    noise = noise_of(tuple(logits.shape), draw).to(dtype)
    logits = logits.to(dtype).requires_grad_()
    groups = pattern.group(logits), pattern.group(noise)
    mask = relaxed_top_n(*groups, pattern.n, draw.lam, draw.tau, sampler.push_down)
    out = mask.flatten(-2) * weight.to(dtype)
    (grad,) = torch.autograd.grad(out, logits, upstream.to(dtype))
    return out.detach(), grad


@pytest.mark.parametrize("spec", PATTERNS)
@pytest.mark.parametrize("std", [0.01, 0.3, 3.0])
def test_mask_sums_to_n_at_every_temperature(spec, std):
    pattern = NMPattern(spec)
    ones, logits, upstream = torch.ones(32, 128), normal(32, 128, std=std), normal(32, 128, seed=1)
    for lam, tau in TEMPERATURES:
        for push_down in ("paper", "scaled"):
            mask, grad = run(
                GumbelTopK(push_down), ones, logits, pattern, draw_at(lam, tau), upstream=upstream
            )
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
        for scaled in (False, True):
            mask, of_keys = relaxed(keys.T, pattern, draw_at(1.0, tau), scaled, grad.T)
            assert mask.sum(0).tolist() == pytest.approx([pattern.n] * 4, abs=1e-5)
            assert of_keys.isfinite().all()


@pytest.mark.parametrize("push_down", ["paper", "scaled"])
@pytest.mark.parametrize("spec", PATTERNS)
def test_equals_autograd_through_the_reference(spec, push_down, monkeypatch):
    monkeypatch.setattr(eager, "_CPU_CHUNK", 1 << 10)
    pattern, shape, sampler = NMPattern(spec), (48, 64), GumbelTopK(push_down)
    weight, upstream = normal(*shape, seed=3), normal(*shape, seed=4)
    for lam, tau, std in [(1, 1, 1), (0.1, 0.3, 0.1), (0.01, 0.1, 0.05), (*END, 0.01)]:
        draw, logits = draw_at(lam, tau, 6, seed=5), normal(*shape, std=std)
        job = (weight, logits, pattern, draw, upstream)
        exact, single, found = (
            reference(sampler, *job),
            reference(sampler, *job, torch.float32),
            run(sampler, *job),
        )
        for ours, plain, true in zip(found, single, exact, strict=True):
            assert ours.dtype == torch.float32
            # Cold temperatures magnify the rounding of fp32; it may cost autograd's own error, not much more.
            allowed = 1e-5 if lam >= 0.1 else 1e-5 + 5 * relative(plain, true)
            assert relative(ours, true) < allowed, f"λ {lam}, τ {tau}"


@pytest.mark.parametrize("spec", PATTERNS)
def test_unrolled_form_is_the_reference_in_double_precision(spec):
    pattern = NMPattern(spec)
    noise = noise_of((500, pattern.m), draw_at(1, 1, 1, "x")).double()
    upstream = normal(500, pattern.m, seed=1).double()
    for lam, tau in TEMPERATURES:
        for push_down in ("paper", "scaled"):
            logits = normal(500, pattern.m, std=0.3).double().requires_grad_()
            mask = relaxed_top_n(logits, noise, pattern.n, lam, tau, push_down)
            (grad,) = torch.autograd.grad(mask, logits, upstream)
            keys = (logits.detach() / lam + noise).T.contiguous()
            found, of_keys = relaxed(keys, pattern, draw_at(lam, tau), push_down == "scaled", upstream.T)
            where = f"λ {lam}, τ {tau}, {push_down}"
            assert relative(found.T, mask.detach()) < 1e-7, where
            assert relative(of_keys.T / lam, grad) < 1e-7, where


@pytest.mark.parametrize("sampler", [GumbelTopK(), GumbelTopK("scaled"), StraightThrough()])
def test_size_of_chunks_changes_no_bit(sampler, monkeypatch):
    pattern, results = NMPattern("4:8"), []
    logits, weight = normal(72, 64, std=0.3), normal(72, 64, seed=1)
    # torch sums the last few groups of a chunk in another order; whole blocks of 32 groups keep every bit.
    for size in (1 << 16, 1 << 8, 1 << 9, 1 << 11):
        monkeypatch.setattr(eager, "_CPU_CHUNK", size)
        results.append(run(sampler, weight, logits, pattern, upstream=weight))
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
        torch.ones(rows, pattern.m), phi.expand(rows, -1), pattern, draw_at(lam, 1.0, 0, "layer", 11)
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
    pattern, draw = NMPattern(spec), draw_at(0.05, 0.2, 1, "layer")
    shape = (32, 32) if pattern.m <= 32 else (pattern.m, pattern.m)
    logits, weight, upstream = normal(*shape, std=0.1), normal(*shape, seed=1), normal(*shape, seed=2)
    hard, hard_grad = run(StraightThrough(push_down), weight, logits, pattern, draw, upstream=upstream)
    _, soft_grad = run(GumbelTopK(push_down), weight, logits, pattern, draw, upstream=upstream)
    keys = logits / draw.lam + noise_of(shape, draw)
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
        sampler.masked_weight(weight, logits, NMPattern("2:4"), draw_at(0.1, 0.3))
    assert kept
    assert set(kept) <= {weight.untyped_storage().data_ptr(), logits.untyped_storage().data_ptr()}


@pytest.mark.parametrize("sampler", [GumbelTopK(), StraightThrough()])
def test_a_draw_is_a_function_of_its_coordinates(sampler):
    pattern, logits, ones = NMPattern("2:4"), normal(64, 64, std=0.1), torch.ones(64, 64)

    def mask(**coordinates):
        return sampler.masked_weight(ones, logits, pattern, draw_at(0.1, 0.1, **coordinates))

    assert torch.equal(mask(), mask())
    for other in (mask(seed=2), mask(index=3), mask(name="b")):
        assert (mask() - other).abs().amax(-1).min() > 0.1, "some row is drawn alike"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampler", [GumbelTopK(), StraightThrough()])
def test_low_precision_weights_are_rounded_once(sampler, dtype):
    pattern, logits, draw = NMPattern("2:4"), normal(32, 32, std=0.1), draw_at(0.2, 0.5)
    weight = normal(32, 32, seed=1).to(dtype)
    mask, _ = run(sampler, torch.ones(32, 32), logits, pattern, draw)
    upstream = normal(32, 32, seed=2).to(dtype)
    out, grad = run(sampler, weight, logits, pattern, draw, upstream=upstream)
    assert torch.equal(out, (mask * weight.float()).to(dtype))
    _, expected = run(sampler, weight.float(), logits, pattern, draw, upstream=upstream.float())
    assert grad.dtype == torch.float32
    assert torch.equal(grad, expected)


def test_final_mask_is_the_top_of_the_logits():
    logits = torch.tensor([[1.0, 2, 2, 2], [0, 0, 0, 0], [-1, -3, -2, -4], [5, 5, 5, 6]])
    expected = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    for sampler in (GumbelTopK(), StraightThrough()):
        found = sampler.hard_mask(logits.clone().requires_grad_(), NMPattern("2:4"))
        assert torch.equal(found, expected)


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
    noise = noise_of((300, pattern.m), draw_at(1, 1, 3, "x", 2)).double()
    upstream = normal(300, pattern.m, seed=1).double()
    for lam, tau in [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (0.5, 0.7)]:
        logits = normal(300, pattern.m, std=0.3).double().requires_grad_()
        found, expected = (
            (mask.detach(), *torch.autograd.grad(mask, logits, upstream))
            for mask in (
                form(logits, noise, pattern.n, lam, tau, push_down) for form in (relaxed_top_n, literal)
            )
        )
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
