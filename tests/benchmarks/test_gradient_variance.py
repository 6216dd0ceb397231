"""The benchmark of the gradient's variance over draws: its estimates against enumeration and a closed form."""

import itertools
import statistics

import pytest
import torch
from torch import nn

from benchmarks import gradient_variance_linear
from benchmarks.gradient_variance import (
    PULLED_BACK,
    Bench,
    Setting,
    cosine,
    cosines,
    inner_products,
    layer_cosine,
    noise,
    relative_variance,
    rows_of,
    samplers,
    signal,
    to_candidates,
    to_weights,
    with_error,
)
from benchmarks.gradient_variance_linear import among_kept, gradients
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.samplers import Categorical, Draw, GumbelSubset, GumbelTopK
from tiny_models import VOCAB_SIZE, tiny_llama

WARM = Setting("warm", 0.05, 0.5)


def test_estimates_are_unbiased():
    """Over all pairs of draws that can come of three gradients on two layers, equally likely."""
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(n, generator=generator) + 1 for n in (5, 7)] for _ in range(3)]
    whole = torch.stack([torch.cat(value) for value in values]).double()
    mean = whole.mean(0)
    pairs = torch.stack([inner_products(pair) for pair in itertools.product(values, repeat=2)])
    torch.testing.assert_close(signal(pairs.sum(1)).mean(), mean.square().sum(), rtol=1e-5, atol=0)
    variance = (whole - mean).square().sum(1).mean()
    torch.testing.assert_close(noise(pairs.sum(1)).mean(), variance, rtol=1e-5, atol=0)
    assert relative_variance(pairs) == pytest.approx(float(variance / mean.square().sum()))
    for found, part in ((cosine, whole), (layer_cosine, whole[:, :5])):
        ones = [torch.cosine_similarity(a, b, 0) for a, b in itertools.product(part, repeat=2)]
        layers = pairs if found is cosine else pairs[:, :1]
        assert found(layers) == pytest.approx(float(sum(ones)) / 9), found


def test_more_draws_are_all_pairs():
    draws = [[torch.randn(6), torch.randn(3)] for _ in range(4)]
    whole = inner_products(draws)
    pairs = torch.stack([inner_products(pair) for pair in itertools.combinations(draws, 2)])
    for statistic in (signal, noise, cosines):
        torch.testing.assert_close(statistic(whole), statistic(pairs).mean(0))


def test_errors_are_the_spread_of_repetitions():
    """Draws of a known mean and variance, again and again."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        draws = [[1 + torch.randn(100, generator=generator)] for _ in range(8)]
        found.append(with_error(relative_variance, inner_products(draws).unsqueeze(0)))
    figures, errors = zip(*found, strict=True)
    assert statistics.mean(figures) == pytest.approx(1, rel=0.05)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(figures), rel=0.25)


@pytest.mark.parametrize("sampler", [GumbelTopK(), Categorical(), GumbelSubset()])
def test_one_of_two_at_equal_logits_is_known_exactly(sampler, monkeypatch):
    """There a mask is uniform, m ~ U(0, 1), and its slope m (1 - m): variance 1/180, squared mean 1/36."""
    monkeypatch.setattr(gradient_variance_linear, "DRAWS", 3)
    pattern, equal = NMPattern("1:2"), Setting("equal", 1.0, 1.0, strength=0.0, std=0.0)
    found, _ = gradients(pattern, equal, sampler)
    products = inner_products([[x] for x in found]).unsqueeze(0)
    assert relative_variance(products) == pytest.approx(1 / 5, rel=0.04)


def test_order_among_the_kept_is_told_from_the_rest():
    likeliest, pattern = torch.tensor([[True, True, False, False]]), NMPattern("2:4")
    assert among_kept([torch.tensor([[3.0, -3.0, 0.0, 0.0]])], likeliest, pattern) == 1
    assert among_kept([torch.tensor([[2.0, 2.0, -1.0, 0.0]])], likeliest, pattern) == 0


@pytest.mark.parametrize("spec", ["1:2", "2:4", "4:8"])
def test_gradients_of_candidates_are_taken_to_the_weights_by_the_chain_rule(spec):
    pattern, draw = NMPattern(spec), Draw(0, 1, 0.02, 0.5)
    phi, weight = torch.randn(8, 16) * 0.02, torch.randn(8, 16)
    assert torch.equal(
        Categorical().hard_mask(to_candidates(phi, pattern), pattern), GumbelTopK().hard_mask(phi, pattern)
    )
    phi.requires_grad_()
    logits = to_candidates(phi, pattern)
    drawn = Categorical().masked_weight(weight, logits, pattern, draw, "layer")
    through, own = torch.autograd.grad(drawn.square().sum(), [phi, logits])
    torch.testing.assert_close(to_weights(own, pattern), through)


@pytest.fixture
def bench(tmp_path):
    lm = load_language_model(resolve_model(str(tiny_llama(tmp_path / "lm"))), device=torch.device("cpu"))
    return Bench(lm, torch.randint(0, VOCAB_SIZE, (4, 16)), [NMPattern("1:2"), NMPattern("2:4")])


def test_at_one_of_m_the_two_are_the_same(bench):
    found, texts = {}, [torch.randint(0, VOCAB_SIZE, (1, 16)) for _ in range(2)]
    pattern = NMPattern("1:2")
    for name, sampler in samplers(pattern).items():
        found[name] = bench.measure(pattern, WARM, sampler, texts, 3)
    rows = rows_of(found)
    assert list(rows) == ["RoI", "MaskLLM", PULLED_BACK]
    for name in ("MaskLLM", PULLED_BACK):
        for key in ("relative_variance", "cosine", "layer_cosine", "loss", "kept"):
            assert rows[name][key] == pytest.approx(rows["RoI"][key], rel=1e-3), (name, key)
        assert rows[name]["over_roi"][0] == pytest.approx(1, rel=1e-3)


def test_the_model_s_gradients_are_those_of_a_plain_backward_pass(bench):
    """And at another pattern, whose prior was measured before any layer was replaced."""
    pattern, ids = NMPattern("2:4"), torch.randint(0, VOCAB_SIZE, (1, 16))
    part = bench.measure(pattern, WARM, GumbelTopK(), [ids], 2)
    layers = {name: bench.lm.get_submodule(name) for name in bench.dense}
    found = []
    for index in range(2):
        next(iter(layers.values())).state.draw = Draw(0, index, WARM.lam, WARM.tau)
        logits = bench.lm(input_ids=ids).logits[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        found.append(torch.cat([layer.logits.grad.flatten() for layer in layers.values()]))
        bench.lm.zero_grad()
    products, (first, second) = part["own"][0].sum(0), found
    assert signal(products) == pytest.approx(float(first @ second), rel=5e-3)
    assert noise(products) == pytest.approx(float((first - second).square().sum()) / 2, rel=5e-3)
    kept = drawn = 0.0
    for layer in layers.values():
        hard = pattern.top(layer.logits.detach())
        drawn += float((layer.effective_weight() / layer.weight)[hard].sum().detach())
        kept += float(hard.sum())
    assert part["kept"] == pytest.approx(drawn / kept, rel=1e-4)
