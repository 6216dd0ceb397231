"""MaskLLM's sampler against a literal softmax over enumerated candidates, and against RoI's where they coincide."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from roi_lightning.errors import UserError
from roi_lightning.noise import gumbel, noise_key
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import (
    Categorical,
    Draw,
    GumbelTopK,
    StraightThrough,
    categorical,
    chunks,
    compiling,
    native,
)
from roi_lightning.samplers.candidates import shares, soft_mask, soft_mask_gradient
from roi_lightning.samplers.kept_norm import KeptNorm

PATTERNS = ["1:2", "1:4", "2:4", "3:4", "2:8", "4:8"]
# λ = 1/κ and τ at the start, in the middle and at the end of MaskLLM's schedule, and hot ones.
TEMPERATURES = [(1.0, 1.0), (1 / 100, 4.0), (1 / 300, 2.0), (1 / 500, 0.05)]


def normal(*shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def new_logits(shape, pattern, dim, std=0.01, seed=0):
    return normal(*Categorical().logits_shape(shape, pattern, dim), std=std, seed=seed)


def candidate_masks(pattern: NMPattern) -> Tensor:
    """All masks of a group, [C, M], double."""
    kept = combinations(range(pattern.m), pattern.n)
    return torch.tensor([[float(i in members) for i in range(pattern.m)] for members in kept]).double()


def in_weights_place(groups: Tensor, dim: int) -> Tensor:
    """[out, in/M, M] or [in/M, out, M] in the weight's shape."""
    return groups.flatten(1) if dim == 1 else groups.movedim(-1, 1).flatten(0, 1)


def literal_mask(logits: Tensor, pattern: NMPattern, dim: int, draw: Draw, layer: str) -> Tensor:
    """Σ_c p_c · candidate_c with candidate c of group g under the noise of number g * C + c; double."""
    rows = logits.double().movedim(0, -1)
    index = torch.arange(logits.numel(), dtype=torch.int32).view(rows.shape)
    noise = gumbel(index, noise_key(draw.seed, draw.index, layer)).double()
    p = ((rows / draw.lam + noise) / draw.tau).softmax(-1)
    return in_weights_place(p @ candidate_masks(pattern), dim)


def run(sampler, weight, logits, pattern, dim=1, draw=None, upstream=None, kept_norm=None):
    """The masked weight and the logits' gradient."""
    logits = logits.clone().requires_grad_()
    drawn = sampler.masked_weight(
        weight, logits, pattern, dim, draw or Draw(0, 0, 0.01, 1.0), "layer", kept_norm
    )
    (grad,) = torch.autograd.grad(drawn, logits, torch.ones_like(drawn) if upstream is None else upstream)
    return drawn.detach(), grad


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("spec", PATTERNS)
def test_equals_autograd_through_a_literal_softmax(spec, dim, monkeypatch):
    monkeypatch.setattr(chunks, "_CPU_CHUNK", 1000)
    pattern, shape = NMPattern(spec), (48, 64)
    weight, upstream = normal(*shape, seed=3), normal(*shape, seed=4)
    for lam, tau in TEMPERATURES:
        draw, logits = Draw(5, 6, lam, tau), new_logits(shape, pattern, dim).requires_grad_()
        wanted = literal_mask(logits, pattern, dim, draw, "layer") * weight.double()
        (gradient,) = torch.autograd.grad(wanted, logits, upstream.double())
        found = run(Categorical(), weight, logits.detach(), pattern, dim, draw, upstream)
        assert found[0].dtype == found[1].dtype == torch.float32
        assert found[1].shape == logits.shape
        # A key of 17 is known to 2e-6, which τ divides.
        allowed = 1e-6 + 4e-6 / tau
        assert relative_error(found[0], wanted.detach()) < allowed, f"λ {lam}, τ {tau}"
        assert relative_error(found[1], gradient) < allowed, f"λ {lam}, τ {tau}"


class Handwritten(torch.autograd.Function):
    """The pair of plain functions as autograd sees it."""

    @staticmethod
    def forward(ctx, keys, tau, pattern):
        share = shares(keys.clone(), tau)
        ctx.save_for_backward(share)
        ctx.args = tau, pattern
        return soft_mask(share, pattern)

    @staticmethod
    def backward(ctx, grad):
        return soft_mask_gradient(ctx.saved_tensors[0], grad, *ctx.args), None, None


@pytest.mark.parametrize("spec", PATTERNS)
def test_handwritten_gradient_is_the_finite_difference(spec):
    pattern = NMPattern(spec)
    keys = normal(math.comb(pattern.m, pattern.n), 5, std=1.5).double()
    keys[:2, 0] = 4.0  # two exact leaders
    keys[:, 1] = 1.0  # all equal
    for tau in (4.0, 1.0, 0.3):
        assert torch.autograd.gradcheck(
            lambda k, tau=tau: Handwritten.apply(k, tau, pattern), keys.requires_grad_()
        )


@pytest.mark.parametrize("spec", PATTERNS)
def test_masks_are_mixtures_at_every_temperature(spec):
    pattern = NMPattern(spec)
    for std in (0.01, 1.0, 30.0):
        logits = new_logits((32, 64), pattern, 1, std)
        for lam, tau in TEMPERATURES:
            mask, grad = run(
                Categorical(), torch.ones(32, 64), logits, pattern, 1, Draw(1, 2, lam, tau), normal(32, 64)
            )
            sums = pattern.group(mask.double()).sum(-1)
            assert (sums - pattern.n).abs().max() < 1e-5
            assert mask.max() <= 1 + 1e-6
            # Nowhere near the denormal numbers, however hopeless a member.
            assert mask.min() > 1e-13
            assert grad.isfinite().all()


def member_logits(logits: Tensor) -> Tensor:
    """Logits [M, out, in/M] of the candidates of 1:M as the logits [out, in] of the members."""
    return logits.movedim(0, -1).flatten(1)


@pytest.mark.parametrize("m", [2, 4, 8])
def test_one_of_m_is_the_same_thing_as_roi(m):
    pattern, shape = NMPattern(f"1:{m}"), (48, 64)
    weight, upstream = normal(*shape, seed=1), normal(*shape, seed=2)
    for lam, tau in TEMPERATURES:
        draw, logits = Draw(7, 8, lam, tau), new_logits(shape, pattern, 1)
        ours, gradient = run(Categorical(), weight, logits, pattern, 1, draw, upstream)
        roi, wanted = run(GumbelTopK(), weight, member_logits(logits), pattern, 1, draw, upstream)
        # The same noise, or they would have nothing to do with each other; another order of the sums.
        assert relative_error(ours, roi) < 1e-6 / min(tau, 1), f"λ {lam}, τ {tau}"
        assert relative_error(member_logits(gradient), wanted) < 1e-6 / min(tau, 1), f"λ {lam}, τ {tau}"
        hard = Categorical().hard_mask(logits, pattern, 1)
        assert torch.equal(hard, GumbelTopK().hard_mask(member_logits(logits), pattern, 1))
    cold = Draw(7, 8, 0.01, 1e-6)
    picked, _ = run(Categorical(), torch.ones(shape), logits, pattern, 1, cold)
    roi, _ = run(StraightThrough(), torch.ones(shape), member_logits(logits), pattern, 1, cold)
    assert torch.equal(picked.round(), roi)


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
        1,
        Draw(11, 0, lam, 1e-6),
        "x",
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


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 64, 999, 1 << 20])
def test_size_of_chunks_changes_nothing_but_rounding(size, dim, monkeypatch):
    pattern, shape = NMPattern("2:4"), (72, 60)
    logits, weight = new_logits(shape, pattern, dim), normal(*shape)
    whole = run(Categorical(), weight, logits, pattern, dim)
    monkeypatch.setattr(chunks, "_CPU_CHUNK", size)
    cut = run(Categorical(), weight, logits, pattern, dim)
    for part, all_at_once in zip(cut, whole, strict=True):
        assert relative_error(part, all_at_once) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_kept_for_backward_but_weight_and_logits(dtype):
    pattern, kept = NMPattern("2:4"), []
    weight, logits = normal(64, 64).to(dtype), new_logits((64, 64), pattern, 1).requires_grad_()

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Categorical().masked_weight(weight, logits, pattern, 1, Draw(0, 0, 0.1, 0.3), "x")
    assert set(kept) == {weight.untyped_storage().data_ptr(), logits.untyped_storage().data_ptr()}


def test_a_draw_is_a_function_of_its_coordinates():
    pattern = NMPattern("2:4")
    logits, ones = new_logits((64, 64), pattern, 1), torch.ones(64, 64)

    def mask(seed=1, index=2, layer="a"):
        return Categorical().masked_weight(ones, logits, pattern, 1, Draw(seed, index, 0.1, 0.1), layer)

    assert torch.equal(mask(), mask())
    for other in (mask(seed=2), mask(index=3), mask(layer="b")):
        assert (mask() - other).abs().amax(-1).min() > 0.1, "some row is drawn alike"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1])
def test_low_precision_weights_are_rounded_once(dim, dtype):
    pattern, shape = NMPattern("2:4"), (32, 32)
    logits, weight = new_logits(shape, pattern, dim), normal(*shape, seed=1).to(dtype)
    upstream = normal(*shape, seed=2).to(dtype)
    mask, _ = run(Categorical(), torch.ones(shape), logits, pattern, dim)
    drawn, grad = run(Categorical(), weight, logits, pattern, dim, upstream=upstream)
    assert torch.equal(drawn, (mask * weight.float()).to(dtype))
    _, wanted = run(Categorical(), weight.float(), logits, pattern, dim, upstream=upstream.float())
    assert torch.equal(grad, wanted)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("spec", ["1:4", "2:4", "4:8"])
def test_kept_norm_is_told_the_norm_and_adds_its_gradient(spec, dim):
    pattern, shape, draw = NMPattern(spec), (32, 64), Draw(1, 1, 0.01, 2.0)
    weight, upstream = normal(*shape, seed=1), normal(*shape, seed=2)
    logits = new_logits(shape, pattern, dim).requires_grad_()
    wanted = literal_mask(logits, pattern, dim, draw, "layer") * weight.double()
    loss = (wanted * upstream.double()).sum() - 0.5 * 0.3 * wanted.square().sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    reward = KeptNorm(0.3, value=torch.tensor(10.0), scale=torch.tensor(0.5))
    _, found = run(Categorical(), weight, logits.detach(), pattern, dim, draw, upstream, reward)
    assert relative_error(found, gradient) < 1e-5
    assert float(reward.value) == pytest.approx(10 + float(wanted.detach().square().sum()), rel=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("spec", PATTERNS)
def test_final_mask_is_the_candidate_of_the_largest_logit(spec, dim):
    pattern = NMPattern(spec)
    logits = new_logits((16, 32) if dim == 1 else (32, 16), pattern, dim, std=1.0).round()  # ties abound
    found = Categorical().hard_mask(logits.clone().requires_grad_(), pattern, dim)
    candidates = candidate_masks(pattern).bool().tolist()
    rows = logits.movedim(0, -1)
    best = [
        max(range(len(candidates)), key=lambda c: (group[c], -c)) for group in rows.flatten(0, 1).tolist()
    ]
    wanted = torch.tensor([candidates[c] for c in best]).view(*rows.shape[:2], pattern.m)
    assert torch.equal(found, in_weights_place(wanted, dim))
    assert pattern.holds(found, dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("spec", ["1:4", "2:4", "4:8"])
def test_prior_moves_logits_as_in_maskllm(spec, dim):
    pattern, shape, sampler = NMPattern(spec), (16, 32), Categorical()
    noise, mask = new_logits(shape, pattern, dim, std=0.01), NMPattern(spec).top(normal(*shape, seed=1), dim)
    assert torch.equal(sampler.initial_logits(noise, None, 0.015, pattern, dim), noise)
    assert torch.equal(sampler.initial_logits(noise, mask, 0.0, pattern, dim), noise)
    before = noise.clone()
    mask = mask.T.contiguous().T  # as priors may come
    moved = sampler.initial_logits(noise, mask, 0.015, pattern, dim) - noise
    assert torch.equal(noise, before)
    alpha, sigma = 3.0, 0.01
    grouped = mask.double().unflatten(dim, (-1, pattern.m)).movedim(dim + 1, -1)
    overlap = (grouped @ candidate_masks(pattern).T).movedim(-1, 0)
    torch.testing.assert_close(
        moved.double(), (overlap - pattern.n / 2) * sigma * alpha, rtol=1e-5, atol=1e-8
    )
    strong = sampler.initial_logits(noise, mask, 1.0, pattern, dim)
    assert torch.equal(sampler.hard_mask(strong, pattern, dim), mask)


@pytest.mark.parametrize(("spec", "count"), [("2:4", 6), ("2:8", 28), ("4:8", 70), ("8:16", 12870)])
def test_logits_lie_candidate_by_candidate(spec, count):
    pattern = NMPattern(spec)
    assert Categorical().logits_shape((96, 64), pattern, 1) == (count, 96, 64 // pattern.m)
    assert Categorical().logits_shape((64, 96), pattern, 0) == (count, 64 // pattern.m, 96)
    for dim, shape in ((1, (96, 64)), (0, (64, 96))):
        logits = torch.zeros(1).expand(Categorical().logits_shape(shape, pattern, dim))
        choices = Categorical().choices(logits, pattern, dim)
        assert choices.shape[-1] == count
        assert choices[..., 0].numel() == 96 * 64 // pattern.m
        assert choices.data_ptr() == logits.data_ptr(), "a view"


def test_choices_are_the_candidates_and_one_is_picked():
    pattern = NMPattern("2:4")
    for dim in (0, 1):
        logits = new_logits((32, 32), pattern, dim)
        best = Categorical().choices(logits, pattern, dim).argmax(-1)
        mask = in_weights_place(candidate_masks(pattern)[best].bool(), dim)
        assert torch.equal(mask, Categorical().hard_mask(logits, pattern, dim))
    assert Categorical().picks(pattern) == 1
    assert GumbelTopK().picks(pattern) == 2
    logits = normal(32, 32)
    assert torch.equal(GumbelTopK().choices(logits, pattern, 1), logits.view(32, 8, 4))


def test_too_many_candidates_are_refused():
    with pytest.raises(
        UserError, match=r"9:18 has 48,620 candidate masks.*20,000.*GumbelTopK, which needs only 18"
    ):
        Categorical().logits_shape((36, 36), NMPattern("9:18"), 1)


def test_noise_goes_on_beyond_the_range_of_int32():
    # Five billion logits, all stored in one number.
    pattern, groups = NMPattern("4:8"), 1 << 26
    logits, last = torch.zeros(1).expand(70, groups, 1), slice(groups - 3, groups)
    job = categorical._Job(pattern, 1, Draw(1, 2, 0.1, 1.0), "layer", None, compiled=False)
    index = torch.arange((groups - 3) * 70, groups * 70).view(3, 70).T.to(torch.int32)
    wanted = gumbel(index, noise_key(1, 2, "layer")).softmax(0)
    torch.testing.assert_close(job.shares(logits, last).squeeze(-1), wanted)
    ints, _ = job.numbers(logits, last)
    assert ints[0] == index[0, 0]


# Compiled. A layer this large is just worth it.
LARGE = 320, 256


@pytest.fixture
def fresh_switch(monkeypatch):
    monkeypatch.setattr(compiling.kernels, "broken", False)
    monkeypatch.setattr(native.loops, "broken", True)
    yield
    assert not compiling.kernels.broken


def both_ways(spec, dim, draw, dtype=torch.float32, kept_norm=False, shape=LARGE):
    """Drawn weight, logits' gradient and reward, compiled and eager."""
    pattern = NMPattern(spec)
    weight, upstream = normal(*shape, seed=1).to(dtype), normal(*shape, seed=2).to(dtype)
    for compiled in (True, False):
        reward = KeptNorm(0.3, scale=torch.tensor(0.5)) if kept_norm else None
        logits = new_logits(shape, pattern, dim)
        found = run(Categorical(compiled), weight, logits, pattern, dim, draw, upstream, reward)
        yield *found, None if reward is None else reward.value


@pytest.mark.parametrize(
    ("dim", "kept_norm"),
    # Each with each is for `-m slow`: a compilation takes seconds.
    [
        (1, True),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, True), (0, False), (1, False))),
    ],
)
def test_compiled_draws_are_the_eager_ones_up_to_rounding(dim, kept_norm, fresh_switch):
    for lam, tau in TEMPERATURES:
        fast, slow = both_ways("2:4", dim, Draw(3, 7, lam, tau), kept_norm=kept_norm)
        allowed = 1e-6 + 4e-6 / tau
        assert relative_error(fast[0], slow[0]) < allowed
        assert relative_error(fast[1], slow[1]) < allowed
        torch.testing.assert_close(fast[2], slow[2])


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["1:4", "2:8"])
def test_compiled_other_patterns_and_bf16(spec, fresh_switch):
    fast, slow = both_ways(spec, 1, Draw(3, 7, 0.01, 2.0), torch.bfloat16)
    # Where rounding to bf16 falls the other way, an entry differs by its last place.
    torch.testing.assert_close(fast[0], slow[0], rtol=2**-7, atol=1e-6)
    assert (fast[0] != slow[0]).float().mean() < 0.01
    assert relative_error(fast[1], slow[1]) < 1e-5


def test_layers_of_all_sizes_share_compiled_code(fresh_switch, monkeypatch):
    draw, graphs = Draw(3, 7, 0.01, 2.0), torch._dynamo.utils.counters["stats"]
    list(both_ways("2:4", 1, draw, kept_norm=True))
    before = graphs["unique_graphs"]
    list(both_ways("2:4", 1, draw, kept_norm=True, shape=(1000, 520)))
    monkeypatch.setattr(chunks, "_COMPILED_CPU_CHUNK", 1 << 15)
    fast, slow = both_ways("2:4", 1, draw, kept_norm=True, shape=(333, 412))
    assert relative_error(fast[1], slow[1]) < 1e-5
    assert graphs["unique_graphs"] == before


@pytest.mark.parametrize(("spec", "shape"), [("2:4", (16, 16)), ("4:8", LARGE)])
def test_small_layers_and_many_candidates_are_not_compiled(spec, shape, monkeypatch):
    monkeypatch.setattr(compiling, "_compiled", lambda kernel: pytest.fail("compiled"))
    monkeypatch.setattr(native.loops, "broken", True)
    pattern = NMPattern(spec)
    run(Categorical(), torch.ones(shape), new_logits(shape, pattern, 1), pattern)
