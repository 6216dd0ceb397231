"""MaskLLM as a method: whole runs, their watching, their plan, and that a cut-off one goes on."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli_helpers import make_lab, new_lab, run
from roi_lightning.cli.lightning import build
from roi_lightning.cli.plan import make_plan
from roi_lightning.learning.callbacks import MaskMonitor
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.samplers import Categorical
from roi_lightning.samplers.noise import noise_key
from roi_lightning.samplers.schedules import Linear, LinearScale
from tiny_models import tiny_gpt2, tiny_qwen2

lab = pytest.fixture(make_lab)
OVERLAY = ["--config", "overlays/maskllm.yaml"]
MASKLLM = {"sampler": Categorical(), "lam": LinearScale(), "tau": Linear(4.0, 0.05, 1.0)}


def slow_mask(layer, logits):
    """The candidate of the largest logit of each group by sorting lists, in the weight's shape."""
    n, m = layer.state.pattern.n, layer.state.pattern.m
    kept = list(combinations(range(m), n))
    mask = torch.zeros(layer.weight.shape, dtype=torch.bool)
    for o in range(logits.shape[1]):
        for g, group in enumerate(logits[:, o].T.tolist()):
            for i in kept[max(range(len(kept)), key=lambda c: (group[c], -c))]:
                mask[o, g * m + i] = True
    return mask


class Snapshots(Callback):
    """Logits and hard masks before training and after every step, the latter slowly."""

    def __init__(self):
        self.logits, self.masks = {}, {}

    def on_train_start(self, trainer, pl_module):
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        now = {name: layer.logits.detach().clone() for name, layer in pl_module.layers.items()}
        self.logits[trainer.global_step] = now
        layers = pl_module.layers
        self.masks[trainer.global_step] = {name: slow_mask(layers[name], x) for name, x in now.items()}


@pytest.fixture(
    scope="module", params=[pytest.param("qwen2 2:4", marks=pytest.mark.slow), "gpt2 2:4", "qwen2 4:8"]
)
def watched(tmp_path_factory, request):
    lab = new_lab(tmp_path_factory)
    kind, pattern = request.param.split()
    shots = Snapshots()
    logger = TensorBoardLogger(lab.folder, name="", version="", default_hp_metric=False)
    learner, _ = lab.learn(
        4,
        model=tiny_gpt2(lab.folder / "gpt2") if kind == "gpt2" else lab.model,
        prior="magnitude",
        pattern=pattern,
        trainer={"logger": logger, "log_every_n_steps": 1},
        callbacks=[shots, MaskMonitor(every_n_steps=2, sample=100_000)],
        **MASKLLM,
    )
    events = EventAccumulator(str(lab.folder), {"scalars": 0, "images": 0, "histograms": 0})
    events.Reload()
    return learner, shots, events


def scalars(events, tag):
    return {event.step: event.value for event in events.Scalars(tag)}


def flips(before, after):
    kept = sum(int(mask.sum()) for mask in after.values())
    return sum(int((mask & ~before[name]).sum()) for name, mask in after.items()) / kept


def test_monitor_numbers_agree_with_slow_ones(watched):
    learner, shots, events = watched
    prior = {name: mask.to_rows() for name, mask in learner.prior_masks.items()}
    for step in (0, 2, 4):
        kappa, tau = 100 + 100 * step, 4 - 3.95 * step / 4
        assert scalars(events, "anneal/lambda")[step] == pytest.approx(1 / kappa)
        assert scalars(events, "anneal/tau")[step] == pytest.approx(tau)
        rows = [x.double().flatten(1).T * kappa for x in shots.logits[step].values()]
        shares = [x.softmax(-1) for x in rows]
        entropy = [
            float(-(p * p.clamp_min(1e-300).log()).sum(-1).mean()) / np.log(p.shape[1]) for p in shares
        ]
        assert scalars(events, "mask/entropy")[step] == pytest.approx(np.mean(entropy), abs=1e-5)
        leads = [x.sort(-1, descending=True).values[:, :2] for x in rows]
        settled = [float((x[:, 0] - x[:, 1] > 4.6).double().mean()) for x in leads]
        assert scalars(events, "mask/settled")[step] == pytest.approx(np.mean(settled), abs=1e-5)
        assert scalars(events, "mask/flips_from_prior")[step] == pytest.approx(
            flips(prior, shots.masks[step]), abs=1e-6
        )
    between = {b: flips(shots.masks[a], shots.masks[b]) for a, b in ((0, 2), (2, 4))}
    assert scalars(events, "mask/flips") == pytest.approx(between, abs=1e-6)
    kinds = {name.split(".")[-1] for name in learner.layers}
    assert set(events.Tags()["histograms"]) == {f"logits/{kind}" for kind in kinds}
    histogram = events.Histograms(f"logits/{sorted(kinds)[0]}")[-1].histogram_value
    same = [x for name, x in shots.logits[4].items() if name.endswith(sorted(kinds)[0])]
    assert histogram.num == sum(x.numel() for x in same)


def test_learned_masks_are_the_candidates_of_the_largest_logits(watched):
    learner, shots, _ = watched
    for name, mask in learner.hard_masks():
        assert torch.equal(mask, shots.masks[4][name])
        assert learner.pattern.holds(mask)
        count = Categorical().logits_shape(mask.shape, learner.pattern)[0]
        assert learner.layers[name].logits.numel() == mask.numel() // learner.pattern.m * count
    assert any(flips(shots.masks[0], shots.masks[step]) for step in (1, 4))


def test_logits_start_at_the_noise_and_three_sigmas_per_common_member(lab):
    learner, _ = lab.learn(1, lr=1e-12, lr_end=1e-12, prior="magnitude", **MASKLLM)
    kept = list(combinations(range(4), 2))
    for name, layer in learner.layers.items():
        generator = torch.Generator().manual_seed(noise_key(0, -1, name)[0] & 0xFFFFFFFF)
        noise = torch.randn(layer.logits.shape, generator=generator) * 0.01
        prior = learner.prior_masks[name].to_rows().unflatten(1, (-1, 4))
        overlap = torch.stack([prior[..., list(members)].sum(-1) for members in kept])
        torch.testing.assert_close(layer.logits.detach(), noise + 0.03 * (overlap - 1), rtol=0, atol=1e-7)


@pytest.mark.parametrize("base", ["quickstart.yaml", "qwen0.5b_2of4.yaml"])
def test_the_overlay_has_the_published_numbers_and_keeps_the_rest(lab, base):
    cli = build(["--config", base, *OVERLAY, "--model.lm", str(lab.model)])
    model = cli.model
    assert type(model) is RoILightningModule
    assert (model.method, model.state.sampler) == ("maskllm", Categorical())
    kappa = [1 / model.lam.at(step, 2000) for step in (0, 500, 1000, 2000)]
    assert kappa == pytest.approx([100, 200, 300, 500])
    assert [model.tau.at(step, 2000) for step in (0, 1000, 2000)] == pytest.approx([4, 2.025, 0.05])
    group = model.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (5e-4, (0.9, 0.95), 0.1)
    assert (model.lr_end, model.kept_norm, model.start.prior) == (5e-5, 1e-5, "sparsegpt")
    # One more member in common: α σ = 3 * 0.01.
    assert 2 * model.start.prior_strength == pytest.approx(3 * model.start.init_std)
    assert model.dtype_name == ("bfloat16" if base.startswith("qwen") else "auto")
    cli.model.preflight(cli.trainer)


def test_a_run_with_the_overlay(lab):
    assert run("fit", *lab.quick(*OVERLAY)) == 0
    folder = lab.folder / "runs" / "quickstart+maskllm"
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["perplexity"]) == ["dense", "magnitude", "sparsegpt", "maskllm"]
    assert summary["zeros"]["prunable"] == 0.5
    assert run("verify", folder / "export", "--base", lab.model) == 0
    masks = MaskSet.load(folder / "mask.safetensors")
    assert all(masks.pattern.holds(mask.to_bool()) for mask in masks.layers.values())
    training = json.loads((folder / "export" / "roi_sparsity.json").read_text())["training"]
    assert training["method"] == "maskllm"
    assert "LinearScale" in training["lam"]


@pytest.mark.parametrize(
    ("builder", "pattern", "times"),
    [(tiny_gpt2, "2:4", 1.5), (tiny_qwen2, "4:8", 8.75), (tiny_gpt2, "1:4", 1)],
)
def test_plan_counts_a_logit_per_candidate(lab, builder, pattern, times):
    model = builder(lab.folder / "m")
    command = ["--config", "quickstart.yaml", *OVERLAY, *lab.options(model=model)]
    plan = make_plan([*command, "--model.pattern", pattern])
    assert plan["logits"] == times * plan["prunable"]
    assert plan["bytes"]["logits"] == 4 * plan["logits"]
    assert plan["bytes"]["optimizer"] == 8 * plan["logits"]
    learner, _ = lab.learn(1, model=model, pattern=pattern, **MASKLLM)
    assert plan["logits"] == sum(layer.logits.numel() for layer in learner.layers.values())
