"""Priors against slow double loops, and what they do to the logits."""

import math
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.lab import brute_top, make_lab, oriented
from helpers.tiny_models import random_masks, tiny_gpt2, tiny_qwen2
from roi_lightning.errors import UserError
from roi_lightning.export import write_export
from roi_lightning.learning.logits import share_kept_at_start
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import Calibration, SparseGPT, Wanda, prune_layers
from roi_lightning.samplers import Categorical, GumbelTopK
from roi_lightning.samplers.schedules import Exponential, Linear

lab = pytest.fixture(make_lab)
BUILDERS = {"linear": tiny_qwen2, "conv1d": tiny_gpt2}


def learner_of(model, lab, **options):
    """A learner that has started, without a trainer, as cold as a prior needs."""
    learner = RoILightningModule(str(model), **{"lam": Linear(0.005, 0.002)} | options)
    data = lab.data()
    learner._trainer = SimpleNamespace(
        ckpt_path=None,
        precision="32-true",
        max_steps=4,
        accumulate_grad_batches=1,
        datamodule=data,
        world_size=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    learner.configure_model()
    learner.on_fit_start()
    return learner, data


def picked(keys, n, prior):
    """The mean number of prior members among n picks without replacement, each by its share of what is left."""
    if not n:
        return 0.0
    others = [[*keys[:i], 0.0, *keys[i + 1 :]] for i in range(len(keys))]
    each = [(i < prior) + picked(rest, n - 1, prior) for i, rest in enumerate(others)]
    return sum(key * x for key, x in zip(keys, each, strict=True)) / sum(keys)


@pytest.mark.parametrize("lam", [1.0, 0.1, 0.03, 0.01, 0.005])
@pytest.mark.parametrize("spec", ["2:4", "1:4", "2:8"])
def test_the_share_of_a_prior_that_first_draws_keep_is_that_of_its_distribution(spec, lam):
    pattern, ahead = NMPattern(spec), math.exp(2 * 0.015 / lam)
    keys = [ahead] * pattern.n + [1.0] * (pattern.m - pattern.n)
    wanted = picked(keys, pattern.n, pattern.n) / pattern.n
    assert share_kept_at_start(GumbelTopK(), pattern, 0.015, 0.0, lam) == pytest.approx(wanted, abs=0.006)
    if spec == "2:4":
        known = {1.0: 0.506, 0.1: 0.56, 0.01: 0.93}
        assert wanted == pytest.approx(known.get(lam, wanted), abs=0.004)
    candidates = [sum(i < pattern.n for i in c) for c in combinations(range(pattern.m), pattern.n)]
    odds = [math.exp(2 * 0.015 / lam * overlap) for overlap in candidates]
    wanted = sum(a * b for a, b in zip(odds, candidates, strict=True)) / sum(odds) / pattern.n
    assert share_kept_at_start(Categorical(), pattern, 0.015, 0.0, lam) == pytest.approx(wanted, abs=0.008)


def test_a_prior_too_weak_for_the_temperature_is_told_of_with_the_remedy(lab):
    says = r"first draws keep 50\.\d% .*'magnitude'.* \(50\.0% would be chance\).* raise model\.prior_strength, lower"
    with pytest.warns(UserWarning, match=says):
        learner_of(lab.model, lab, prior="magnitude", lam=Exponential(1.0, 0.002))
    learner_of(lab.model, lab, prior="magnitude", prior_strength=5.0, lam=Exponential(1.0, 0.002))
    learner_of(lab.model, lab, prior="none", lam=Exponential(1.0, 0.002))


@pytest.mark.filterwarnings("ignore:the first draws keep")  # as they should, where there is no push
@pytest.mark.parametrize("strength", [0.0, 0.015, 0.5])
def test_logits_start_at_noise_moved_towards_the_prior(lab, strength):
    learner, _ = learner_of(lab.model, lab, prior="magnitude", prior_strength=strength, init_std=0.01)
    masks = {name: mask.to_bool() for name, mask in learner.prior_masks.items()}
    kept = torch.cat([learner.tensors[name].learned["logits"].detach()[mask] for name, mask in masks.items()])
    pruned = torch.cat(
        [learner.tensors[name].learned["logits"].detach()[~mask] for name, mask in masks.items()]
    )
    assert len(kept) == len(pruned)
    assert float(kept.mean() - pruned.mean()) == pytest.approx(2 * strength, abs=4e-4)
    assert float(kept.std()) == pytest.approx(0.01, rel=0.02)
    assert float(pruned.std()) == pytest.approx(0.01, rel=0.02)


def test_without_a_prior_the_logits_are_normal_and_depend_on_the_seed_alone(lab):
    logits = {}
    for key, seed in (("a", 0), ("b", 0), ("c", 1)):
        learner, _ = learner_of(lab.model, lab, seed=seed, init_std=0.01)
        logits[key] = torch.cat(
            [layer.learned["logits"].detach().flatten() for layer in learner.tensors.values()]
        )
        assert learner.prior_masks == {}
    assert torch.equal(logits["a"], logits["b"])
    assert not torch.equal(logits["a"], logits["c"])
    assert abs(float(logits["a"].mean())) < 2e-4
    assert float(logits["a"].std()) == pytest.approx(0.01, rel=0.02)
    assert float((logits["a"].abs() < 0.01).float().mean()) == pytest.approx(0.6827, abs=0.01)


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_mask_file_and_an_exported_directory_are_priors(lab, form):
    learner, _ = learner_of(lab.model, lab)
    masks = random_masks(learner.source)
    if form == "file":
        prior = lab.folder / "prior.safetensors"
        masks.save(prior)
    else:
        prior = write_export(learner.source, masks, lab.folder / "out")
    learner, _ = learner_of(lab.model, lab, prior=str(prior), prior_strength=1.0)
    stored = learner.stored_weights
    for name, layer in learner.tensors.items():
        assert torch.equal(layer.learned["logits"] > 0, masks.layers[stored[name]].to_bool()), name


def test_a_prior_of_another_model_is_refused(lab):
    prior = lab.folder / "prior.safetensors"
    random_masks(resolve_model(str(tiny_qwen2(lab.folder / "other", seed=7)))).save(prior)
    with pytest.raises(UserError, match="another model"):
        learner_of(lab.model, lab, prior=str(prior))


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize(
    ("prior", "method", "activations"),
    [
        ("activation", Wanda(), "dense"),
        ("wanda", Wanda(), "sequential"),
        ("sparsegpt", SparseGPT(update_weights=False), "sequential"),
    ],
)
def test_one_shot_priors_are_what_prune_finds(tmp_path, lab, builder, prior, method, activations):
    model = builder(tmp_path / "m")
    learner, data = learner_of(model, lab, prior=prior, prior_windows=3, dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    calibration = Calibration(data.windows("train", 3), activations)
    walk = prune_layers(plain, prunable_layers(plain), method, learner.pattern, calibration)
    wanted = {name: pruned.mask for name, pruned in walk}
    assert wanted.keys() == learner.prior_masks.keys()
    for name, mask in wanted.items():
        assert torch.equal(learner.prior_masks[name].to_rows(), mask), name
        layer = learner.tensors[name]
        assert torch.equal(layer.dense, oriented(layer, plain.get_submodule(name).weight))


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_with_a_margin_only_what_leads_by_it_leaves_the_prior(tmp_path, lab, builder):
    margin = 0.01
    learner, _ = learner_of(builder(tmp_path / "m"), lab, prior="magnitude", prior_margin=margin)
    names = [name for name in learner.tensors if "layers.0" in name or "h.0" in name][:2]
    for name, layer in ((name, learner.tensors[name]) for name in names):
        prior = learner.prior_masks[name].to_rows()
        with torch.no_grad():
            layer.learned["logits"].add_(torch.randn_like(layer.learned["logits"]), alpha=0.02)
        wanted = brute_top(layer.learned["logits"].detach() + margin * (2.0 * prior - 1), 2, 4)
        assert torch.equal(learner.hard_mask(layer), wanted), name
        plain = GumbelTopK().hard_mask(layer.learned["logits"], NMPattern("2:4"))
        assert 0 < (wanted & ~prior).sum() < (plain & ~prior).sum()
