"""MaskLLM as a method: whole runs, their watching, their plan, and that a cut-off one goes on."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.lab import make_lab, run
from helpers.tiny_models import tiny_gpt2, tiny_qwen2
from roi_lightning.cli.lightning import build
from roi_lightning.cli.plan import make_plan
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.samplers import Categorical

lab = pytest.fixture(make_lab)
OVERLAY = ["--config", "overlays/maskllm.yaml"]


@pytest.mark.parametrize("base", ["quickstart.yaml", "qwen0.5b_2of4.yaml"])
def test_the_overlay_has_the_published_numbers_and_keeps_the_rest(lab, base):
    cli = build(["--config", base, *OVERLAY, "--model.lm", str(lab.model)])
    model = cli.model
    assert type(model) is RoILightningModule
    assert (model.method, model.sampler) == ("maskllm", Categorical())
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
    exported = AutoModelForCausalLM.from_pretrained(folder / "export")
    zeros = sum(int((x == 0).sum()) for x in exported.parameters())
    assert summary["zeros"] == {"prunable": 0.5, "model": pytest.approx(zeros / exported.num_parameters())}
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
    learner = RoILightningModule(str(model), pattern=pattern, sampler=Categorical())
    learner.configure_model()
    assert plan["logits"] == sum(logits.numel() for logits in learner.learned)
