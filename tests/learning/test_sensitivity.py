"""What pruning a layer costs, against whole forward passes of a model in which it alone was pruned."""

import pytest
import torch

from roi_lightning.learning.sensitivity import layer_costs
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import input_dim, prunable_layers
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from tiny_models import tiny_gemma2, tiny_gpt2, tiny_llama, tiny_mixtral

BUILDERS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "gemma2": tiny_gemma2, "mixtral": tiny_mixtral}
CHOICES = [NMPattern("1:4"), NMPattern("4:8")]


def logits_of(lm, windows):
    with torch.no_grad():
        return lm(input_ids=windows).logits[:, :-1].double()


def input_norms(lm, layers, windows):
    """The sum of squares of every layer's inputs in whole forward passes."""
    sums = dict.fromkeys(layers, 0)

    def hook(name):
        def add(_, args):
            sums[name] = sums[name] + args[0].detach().flatten(0, -2).float().square().sum(0)

        return add

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    for window in windows:
        logits_of(lm, window[None])
    for handle in handles:
        handle.remove()
    return sums


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "mixtral" else []) for name in BUILDERS]
)
def test_costs_are_those_of_whole_forward_passes(name, tmp_path):
    lm = load_language_model(resolve_model(str(BUILDERS[name](tmp_path / "m"))))
    windows = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(0))
    every = prunable_layers(lm)
    layers = dict(list(every.items())[-9::2])  # of more than one block
    choices = {name: CHOICES[: 1 + i % 2] for i, name in enumerate(layers)}
    before = {name: x.clone() for name, x in lm.state_dict().items()}
    costs = layer_costs(lm, layers, choices, windows)
    assert all(torch.equal(x, before[name]) for name, x in lm.state_dict().items())
    assert all("forward" not in module.__dict__ for module in lm.modules())
    assert {name: list(own) for name, own in costs.items()} == choices

    dense, norms = logits_of(lm, windows).log_softmax(-1), input_norms(lm, layers, windows)
    for layer_name, layer in layers.items():
        for pattern in choices[layer_name]:
            original, rows = layer.weight.data, layer.weight.data if input_dim(layer) else layer.weight.data.T
            mask = pattern.top(rows.abs() * norms[layer_name].sqrt())
            layer.weight.data = (rows * mask) if input_dim(layer) else (rows * mask).T.contiguous()
            pruned = logits_of(lm, windows).log_softmax(-1)
            layer.weight.data = original
            expected = (dense.exp() * (dense - pruned)).sum(-1).mean()
            assert costs[layer_name][pattern] == pytest.approx(float(expected), rel=1e-3, abs=1e-7)
