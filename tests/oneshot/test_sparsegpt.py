"""SparseGPT and Wanda against slow, obvious references in fp64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import led_pruning
from helpers.tiny_models import tiny_gemma2
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.loading import freeze
from roi_lightning.oneshot import SparseGPT, Wanda

PATTERNS = [(2, 4), (1, 4), (2, 8), (4, 8), (3, 6)]


def layer(seed, rows=6, columns=24, tokens=96, dtype=torch.float32):
    """A weight and correlated inputs with columns of very different size, as language models have them."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    sizes = torch.rand(columns, generator=generator) * 3 + 0.1
    inputs = torch.randn(tokens, columns, generator=generator) @ mix * sizes
    return torch.randn(rows, columns, generator=generator).to(dtype), inputs.to(dtype)


def measured(method, inputs, parts=3):
    observer = method.observer(inputs.shape[1], inputs.device)
    for part in inputs.chunk(parts):
        observer.add(part[None])
    return observer


def prune(method, weight, inputs, n, m):
    return method.prune(weight, measured(method, inputs), NMPattern(f"{n}:{m}"), "layer")


def slow_sparsegpt(weight, inputs, n, m, damping=0.01):
    """Mask and weights, each step a dense solve: a pruned column's loss is made up by all columns after it.

    With the columns up to j fixed, the best values d of the rest (as differences from the original weights)
    minimise dᵀHd; that is H_SS d_S = −H_SP d_P.
    """
    weight, inputs = weight.double(), inputs.double()
    hessian = 2 / len(inputs) * inputs.T @ inputs
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    size = weight.shape[1]
    masks, results = [], []
    for row in weight:
        current, kept = row.clone(), [False] * size
        for j in range(size):
            if j % m == 0:
                price = {
                    i: current[i] ** 2 / torch.linalg.inv(hessian[i:, i:])[0, 0] for i in range(j, j + m)
                }
                for i in sorted(price, key=lambda i: (-price[i], i))[:n]:
                    kept[i] = True
            if kept[j]:
                continue
            current[j] = 0
            past, rest = slice(0, j + 1), slice(j + 1, size)
            difference = current[past] - row[past]
            if j + 1 < size:
                change = -torch.linalg.solve(hessian[rest, rest], hessian[rest, past] @ difference)
                current[rest] = row[rest] + change
        masks.append(kept)
        results.append(current)
    return torch.tensor(masks), torch.stack(results)


def errors(weight, pruned, inputs):
    """Every output's squared error over all tokens, from the inputs themselves."""
    return (inputs.double() @ (pruned.double() - weight.double()).T).square().sum(0)


@pytest.mark.parametrize(("n", "m"), PATTERNS)
@pytest.mark.parametrize("block_size", [1, 8, 128])
def test_sparsegpt_equals_dense_solves(n, m, block_size):
    weight, inputs = layer(seed=n * m)
    mask, wanted = slow_sparsegpt(weight, inputs, n, m)
    plain = weight.masked_fill(~mask, 0)
    worse = errors(weight, wanted, inputs) > errors(weight, plain, inputs)
    wanted[worse] = plain[worse].double()
    pruned = prune(SparseGPT(block_size=block_size), weight, inputs, n, m)
    assert torch.equal(pruned.mask, mask)
    assert (pruned.weight.double() - wanted).abs().max() < 1e-4
    assert not worse.all()


@pytest.mark.parametrize(("n", "m"), PATTERNS)
def test_sparsegpt_mask_only_keeps_the_same_weights(n, m):
    weight, inputs = layer(seed=11)
    only = prune(SparseGPT(update_weights=False), weight, inputs, n, m)
    assert only.weight is None
    assert torch.equal(only.mask, prune(SparseGPT(), weight, inputs, n, m).mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (2, 8)])
def test_the_update_never_makes_an_output_worse_than_the_mask_alone(n, m, dtype):
    gains = []
    for seed in range(20):
        # Few tokens and strong correlation: here a greedy update can overshoot.
        weight, inputs = layer(seed, rows=16, columns=32, tokens=12 + 4 * seed, dtype=dtype)
        pruned = prune(SparseGPT(), weight, inputs, n, m)
        plain = errors(weight, weight.masked_fill(~pruned.mask, 0), inputs)
        updated = errors(weight, pruned.weight, inputs)
        assert (updated <= plain * (1 + 1e-4)).all()
        gains.append((updated / plain).mean())
        assert pruned.weight.dtype == dtype
        assert not pruned.weight[~pruned.mask].any()
    assert sum(gains) / len(gains) < 0.8


def test_inputs_that_never_fire_go_first_and_their_kept_weights_stay():
    weight, inputs = layer(seed=3)
    inputs[:, [0, 5, 6, 8, 9, 10]] = 0  # one, two and three of the first three groups
    pruned = prune(SparseGPT(), weight, inputs, 2, 4)
    assert not pruned.mask[:, [0, 5, 6]].any()
    assert pruned.mask[:, 11].all()
    dead = pruned.mask[:, 8:11]
    assert torch.equal(pruned.weight[:, 8:11][dead], weight[:, 8:11][dead])
    assert pruned.weight.isfinite().all()


def test_a_hessian_that_needs_more_damping_gets_it_with_a_warning():
    weight, _ = layer(seed=4)
    inputs = torch.ones(50, 1) * torch.linspace(1, 100, 24)  # rank one
    with pytest.warns(UserWarning, match=r"layer: its Hessian .* damping"):
        pruned = prune(SparseGPT(damping=1e-7), weight, inputs, 2, 4)
    assert NMPattern("2:4").holds(pruned.mask)
    assert pruned.weight.isfinite().all()


def test_a_hopeless_hessian_is_an_error_that_names_the_layer():
    method = SparseGPT()
    weight, inputs = layer(seed=4)
    observed = measured(method, inputs)
    observed.total.neg_()
    with pytest.raises(UserError, match=r"layer: its Hessian can't be factorised"):
        method.prune(weight, observed, NMPattern("2:4"), "layer")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", [Wanda(), SparseGPT()])
def test_inputs_that_are_nan_are_refused(method, value):
    _, inputs = layer(seed=1)
    inputs[3, 2] = value
    with pytest.raises(UserError, match="layer met inputs that are infinite or NaN"):
        measured(method, inputs).check("layer")


@pytest.mark.slow
def test_a_near_tie_changes_all_later_layers_unless_they_are_met_with_the_same_inputs(tmp_path):
    directory = tiny_gemma2(tmp_path / "model")
    windows = torch.randint(0, 250, (4, 32), generator=torch.Generator().manual_seed(0))

    def agreements(leader):
        for seed in range(1, 9):
            lm = freeze(AutoModelForCausalLM.from_pretrained(directory))
            embedding, noise = lm.get_input_embeddings().weight, torch.Generator().manual_seed(seed)
            embedding.mul_(1 + 1e-6 * torch.randn(embedding.shape, generator=noise))
            found, _ = led_pruning.prune(lm, SparseGPT(), windows, leader=leader)
            yield led_pruning.least_agreement(first, found)[0]

    lm = freeze(AutoModelForCausalLM.from_pretrained(directory))
    first, _ = led_pruning.prune(lm, SparseGPT(), windows)
    assert min(agreements(None)) < 0.95
    assert min(agreements(first)) > 0.999
