"""HyperPrune against exhaustive search, direct sums, and whole forward passes."""

from itertools import combinations, product

import pytest
import torch

from helpers.tiny_models import tiny_gpt2, tiny_llama, tiny_mixtral
from roi_lightning.contrib.hyperprune.block import Block, BlockLayer
from roi_lightning.contrib.hyperprune.method import HyperPrune, group_features, outlier_term, output_error
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import Calibration, Wanda, prune_layers
from roi_lightning.oneshot.config import PruneConfig

CPU = torch.device("cpu")


def linear_block(pattern, index=0, size=4, distinct=4, copies=64, tokens=64):
    """x + x[:size] Wᵀ with correlated inputs and a few distinct rows, whose masks can be searched one by one.

    Returns:
        The block, what its layer receives, [windows, tokens, in], and the layer's weight.
    """
    generator = torch.Generator().manual_seed(index)
    hidden = torch.randn(1, tokens, distinct * copies, generator=generator)
    hidden[..., :size] = hidden[..., :size] @ (
        torch.eye(size) + torch.randn(size, size, generator=generator) / 2
    )
    inputs, weight = hidden[..., :size], torch.randn(distinct, size, generator=generator).repeat(copies, 1)
    observed = Wanda.observer(size, CPU)
    observed.add(inputs)
    name = f"blocks.{index}.proj"

    def output(window, weights):
        return hidden[window, None] + inputs[window, None] @ weights.get(name, weight).T

    layers = {name: BlockLayer(weight, observed, NMPattern(pattern), "proj")}
    block = Block(index, layers, len(inputs), lambda window: hidden[window, None], output)
    return block, inputs, weight


def best_mask(weight, inputs, n, m):
    """The mask of least output error, each row by trying them all."""
    x = inputs.flatten(0, 1).double()
    kept = list(combinations(range(m), n))
    rows = []
    for row in weight.double():
        masks = []
        for choice in product(kept, repeat=len(row) // m):
            mask = torch.zeros(len(row) // m, m, dtype=torch.bool)
            mask.scatter_(1, torch.tensor(choice), value=True)
            masks.append(mask.flatten())
        errors = torch.stack([(x @ row.masked_fill(mask, 0)).square().sum() for mask in masks])
        rows.append(masks[int(errors.argmin())])
    return torch.stack(rows)


@pytest.mark.parametrize(("pattern", "index"), [("1:4", 2), ("2:4", 6)])
def test_finds_the_mask_of_least_output_error_where_wanda_does_not(pattern, index):
    block, inputs, weight = linear_block(pattern, index)
    method = HyperPrune(
        steps=150, windows_per_step=1, hidden=32, prior="none", lr=3e-3, outlier=0, tau_end=0.5
    )
    method.learn(block)
    (name, layer), *_ = block.layers.items()
    distinct = best_mask(weight[:4], inputs, layer.pattern.n, layer.pattern.m)
    mask = method.prune(weight, layer.inputs, layer.pattern, name).mask
    assert torch.equal(mask, distinct.repeat(len(weight) // 4, 1))
    assert not torch.equal(mask, Wanda().prune(weight, layer.inputs, layer.pattern, name).mask)


def test_the_terms_equal_direct_sums():
    block, inputs, weight = linear_block("2:4")
    (name, layer), *_ = block.layers.items()
    masked = weight * torch.rand(weight.shape)
    tokens = inputs.flatten(0, 1)
    kept, whole = (sum((x @ torch.diag(row)).square().sum() for row in tokens) for x in (masked, weight))
    assert torch.allclose(outlier_term(masked, weight, layer.inputs.squares), kept / whole, rtol=1e-4)
    x = inputs[0]
    wanted = (x @ weight.T - x @ masked.T).square().sum() / (x @ weight.T).square().sum()
    assert torch.allclose(output_error(block, 0, {name: masked}), wanted, rtol=1e-4)


def drift_of_the_first_block(continual):
    first, *_ = linear_block("2:4", 0)
    second, *_ = linear_block("2:4", 1)
    method = HyperPrune(steps=16, windows_per_step=1, hidden=16, prior="none", lr=3e-3, continual=continual)
    method.learn(first)
    (layer,) = first.layers.values()
    network, groups = method._networks[layer.pattern], group_features(layer, "weights")
    before = network.logits(groups, 0, "proj").detach()
    method.learn(second)
    return float((network.logits(groups, 0, "proj").detach() - before).square().mean())


def test_the_continual_term_keeps_the_logits_of_earlier_blocks():
    assert drift_of_the_first_block(continual=10) < 0.1 * drift_of_the_first_block(continual=0)


MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "mixtral": tiny_mixtral}


@pytest.fixture(params=MODELS)
def lm(request, tmp_path):
    return load_language_model(resolve_model(str(MODELS[request.param](tmp_path / "m"))))


@pytest.fixture
def windows():
    return torch.randint(0, 250, (3, 24), generator=torch.Generator().manual_seed(0))


class Watching(HyperPrune):
    """Keeps the blocks that it is given, and what they gave for the second window under halved weights."""

    def start(self, seed):
        super().start(seed)
        self.blocks = []

    def learn(self, block):
        halved = {name: layer.weight / 2 for name, layer in block.layers.items()}
        self.blocks.append((block, block.output(1, {}), block.output(1, halved)))
        super().learn(block)


def outputs_of(lm, blocks, window):
    """What every block gives in a whole forward pass."""
    seen = []
    handles = [
        block.register_forward_hook(
            lambda *x: seen.append(x[2] if isinstance(x[2], torch.Tensor) else x[2][0])
        )
        for block in blocks
    ]
    with torch.no_grad():
        lm(input_ids=window[None])
    for handle in handles:
        handle.remove()
    return seen


def test_blocks_run_as_in_whole_forward_passes_of_pruned_models(lm, windows):
    layers, method = prunable_layers(lm), Watching(steps=2, hidden=8)
    got = dict(prune_layers(lm, layers, method, NMPattern("2:4"), Calibration(windows)))
    assert list(got) == list(layers)
    assert all(NMPattern("2:4").holds(pruned.mask) for pruned in got.values())
    blocks = lm.transformer.h if hasattr(lm, "transformer") else lm.model.layers
    for index, (block, plain, halved) in enumerate(method.blocks):
        assert torch.allclose(plain, outputs_of(lm, blocks, windows[1])[index], atol=1e-5)
        for name, layer in block.layers.items():
            assert torch.equal(layer.weight, layers[name].of(lm))
            layers[name].of(lm).div_(2)
        assert torch.allclose(halved, outputs_of(lm, blocks, windows[1])[index], atol=1e-5)
        for name in block.layers:
            layers[name].of(lm).mul_(2).masked_fill_(~got[name].mask, 0)


def test_the_seed_decides_and_nothing_is_left_of_an_earlier_model(tmp_path, windows):
    lm = load_language_model(resolve_model(str(tiny_llama(tmp_path / "m"))))
    layers = prunable_layers(lm, ["down_proj", "q_proj"])
    method = HyperPrune(steps=4, hidden=8, prior="none")
    masks = [
        torch.cat([x.mask.flatten() for _, x in prune_layers(lm, layers, method, NMPattern("2:4"), given)])
        for given in (Calibration(windows, seed=seed) for seed in (1, 1, 2))
    ]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("prior", ["magnitude", "wanda", "sparsegpt"])
def test_a_strong_prior_is_the_mask(tmp_path, windows, prior):
    lm = load_language_model(resolve_model(str(tiny_llama(tmp_path / "m"))))
    layers, calibration = prunable_layers(lm), Calibration(windows)
    method = HyperPrune(steps=1, hidden=8, prior=prior, prior_strength=100)
    got = dict(prune_layers(lm, layers, method, NMPattern("2:4"), calibration))
    wanted = PruneConfig(method=prior).chosen
    wanted.updates_weights = False
    for name, pruned in prune_layers(lm, layers, wanted, NMPattern("2:4"), calibration):
        assert torch.equal(got[name].mask, pruned.mask)
