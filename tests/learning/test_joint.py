"""Mask and weights learned at once: against a loop in plain PyTorch; the export, and that a run can go on."""

import json
import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from helpers.lab import Batches, brute_top, make_lab, oriented, run, whole_and_resumed
from helpers.tiny_models import tiny_gpt2, tiny_qwen2
from roi_lightning.api import learn
from roi_lightning.errors import UserError
from roi_lightning.learning import RoILightningModule
from roi_lightning.learning.callbacks import SparseExport
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.source import SIDECAR
from roi_lightning.samplers import Categorical, Draw, GumbelSubset, GumbelTopK, StraightThrough
from roi_lightning.samplers.schedules import Constant

lab = pytest.fixture(make_lab)
PATTERN = NMPattern("2:4")
LAM, TAU, RATE, WEIGHTS_RATE, CLIP = 0.3, 0.4, 0.02, 2e-3, 0.5
SAMPLERS = [GumbelTopK(), Categorical()]
SAMPLERS += [pytest.param(sampler, marks=pytest.mark.slow) for sampler in (StraightThrough(), GumbelSubset())]
IDS = torch.arange(40).reshape(2, 20) * 5 % 256


def together(lab, steps, model, **options):
    """Learn mask and weights; the learner."""
    options = {"dtype": "float32", "lam": Constant(LAM), "tau": Constant(TAU), "lr_end": RATE / 10} | options
    clipped = {"gradient_clip_val": CLIP} | options.pop("trainer", {})
    return lab.learn(
        steps, model=model, lr=RATE, lr_weights=WEIGHTS_RATE, init_std=0.5, trainer=clipped, **options
    )[0]


def reference(model, start, sampler, batches, parts, distillation):
    """The same with both factors of masked weights as plain parameters, a product that autograd differentiates."""
    lm, dense = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    lm.requires_grad_(False)
    layers = {name: lm.get_submodule(name) for name in start}
    logits = {name: torch.nn.Parameter(x.clone()) for name, x in start.items()}
    is_conv = {name: type(layer).__name__ == "Conv1D" for name, layer in layers.items()}
    trained = {
        name: torch.nn.Parameter((layer.weight.T if is_conv[name] else layer.weight).clone())
        for name, layer in layers.items()
    }
    groups = [{"params": list(logits.values())}, {"params": list(trained.values()), "lr": WEIGHTS_RATE}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    steps = len(batches) // parts
    for step in range(steps):
        share = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        for group, rate in zip(optimizer.param_groups, (RATE, WEIGHTS_RATE), strict=True):
            group["lr"] = rate * share
        for part in range(parts):
            drawn = {}
            for name, weight in trained.items():
                draw, ones = Draw.of(0, step + (part << 32), name, LAM, TAU), torch.ones_like(weight)
                drawn[name] = weight * sampler.masked_weight(ones, logits[name], PATTERN, draw)
            weights = {f"{name}.weight": x.T if is_conv[name] else x for name, x in drawn.items()}
            ids = batches[step * parts + part]
            said = torch.func.functional_call(lm, weights, kwargs={"input_ids": ids}).logits[:, :-1]
            with torch.no_grad():
                wanted = dense(input_ids=ids).logits[:, :-1].flatten(0, 1).log_softmax(-1)
            nll = F.cross_entropy(said.flatten(0, 1), ids[:, 1:].flatten())
            log_p = said.flatten(0, 1).log_softmax(-1)
            kl = F.kl_div(log_p, wanted, log_target=True, reduction="batchmean")
            (((1 - distillation) * nll + distillation * kl) / parts).backward()
        torch.nn.utils.clip_grad_norm_([*logits.values(), *trained.values()], CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return logits, trained


class Start(Batches):
    """The micro-batches, and the logits before the first."""

    def on_train_start(self, trainer, pl_module):
        self.logits = {
            name: layer.learned["logits"].detach().clone() for name, layer in pl_module.tensors.items()
        }


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_gpt2])
def test_both_are_learned_as_by_hand(lab, builder, sampler):
    model = builder(lab.folder / "base", dtype=torch.float32)  # GPT-2 has dropouts, which are off
    start, parts, out = Start(), 2, lab.folder / "out"
    settings = {"trainer": {"accumulate_grad_batches": parts}, "distillation": 0.4, "sampler": sampler}
    learner = together(lab, 4, model, callbacks=[start, SparseExport(str(out))], **settings)
    logits, trained = reference(model, start.logits, sampler, start.seen, parts, 0.4)
    written, dense = (load_file(folder / "model.safetensors") for folder in (out, model))
    for name, layer in learner.tensors.items():
        torch.testing.assert_close(layer.learned["logits"], logits[name], rtol=0, atol=2e-4)
        torch.testing.assert_close(layer.learned["trained"], trained[name], rtol=0, atol=2e-5)
        stored = learner.stored_weights[name]
        mask = learner.sampler.hard_mask(layer.learned["logits"], PATTERN)
        assert torch.equal(oriented(layer, written[stored]), layer.learned["trained"].detach() * mask)
        assert not torch.equal(oriented(layer, dense[stored]), layer.learned["trained"])
    others = dense.keys() - set(learner.stored_weights.values())
    assert all(torch.equal(written[name], dense[name]) for name in others)


@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_gpt2])
def test_the_export_and_the_baselines_are_what_they_say(lab, builder):
    model, out = builder(lab.folder / "base"), lab.folder / "out"
    learner = together(
        lab, 3, model, callbacks=[SparseExport(str(out))], dtype="auto", prior="magnitude", prior_strength=1.0
    )
    assert run("verify", out, "--base", model) == 0
    card = (out / "README.md").read_text()
    assert f"weights of {len(learner.tensors)} layers were trained along with the mask" in card
    training = json.loads((out / SIDECAR).read_text())["training"]
    assert (training["method"], training["lr_weights"]) == ("roi+weights", WEIGHTS_RATE)
    stored, dtype = AutoConfig.from_pretrained(model).dtype, learner.teacher.dtype
    assert {x.dtype for x in load_file(out / "model.safetensors").values()} == {stored}
    exported, plain = (AutoModelForCausalLM.from_pretrained(x, dtype=dtype) for x in (out, model))
    with torch.no_grad():
        for layer in learner.tensors.values():  # where a CPU computes in fp32 what is stored in bf16
            layer.learned["trained"].copy_(layer.learned["trained"].to(stored))
        torch.testing.assert_close(learner.harden()(IDS).logits, exported(IDS).logits)
        assert torch.equal(learner.teacher(IDS).logits, plain(IDS).logits)
        for name, prior in learner.prior_masks.items():
            mask = prior.to_rows()
            layer, weight = learner.tensors[name], plain.get_submodule(name).weight.data
            assert torch.equal(mask, brute_top(oriented(layer, weight).abs(), 2, 4))
            oriented(layer, weight)[~mask] = 0
        student = learner.harden(learner.prior_masks)
        torch.testing.assert_close(student(IDS).logits, plain(IDS).logits)


def test_weights_that_are_zero_stay_zero(lab):
    learner = together(lab, 1, lab.model)
    tensor = learner.tensors["model.layers.0.mlp.up_proj"]
    with torch.no_grad():
        tensor.learned["trained"][:, ::2] = 0
    learner.fill(learner.draw)
    learner.student(IDS).logits.square().sum().backward()
    gradient = tensor.learned["trained"].grad
    assert not gradient[:, ::2].any()
    assert gradient[:, 1::2].any()
    assert tensor.learned["logits"].grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:the first draws keep")
def test_a_run_of_a_shipped_configuration(lab, capsys):
    both = ["--model.lr_weights", "1e-3"]
    assert run("fit", *lab.quick("--run", "joint", *both)) == 0
    folder = lab.folder / "runs" / "joint"
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["perplexity"]) == ["dense", "magnitude", "activation", "roi+weights"]
    assert MaskSet.load(folder / "mask.safetensors").updated
    capsys.readouterr()
    assert run("apply", lab.model, folder / "mask.safetensors", "--out", lab.folder / "no") == 1
    assert "belong to weights that their method updated" in capsys.readouterr().err
    assert run("plan", *lab.quick(*both)) == 0
    said = capsys.readouterr().out
    assert "logits and weights to learn" in said
    assert f"{2 * sum(layer.total for layer in MaskSet.load(folder / 'export').layers.values()):,}" in said


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_ends_with_the_same_bits(lab):
    whole_and_resumed(lab.folder, partial(together, lab, 6, lab.model))


@pytest.mark.parametrize("rate", [0.0, math.nan])
def test_what_is_no_learning_rate_is_refused(lab, rate):
    with pytest.raises(UserError, match=rf"model.lr_weights is {rate}; set it to a learning rate above 0"):
        RoILightningModule(str(lab.model), lr_weights=rate)


def test_masks_alone_are_not_learned_with_weights(lab):
    lm = AutoModelForCausalLM.from_pretrained(lab.model)
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    learner = partial(RoILightningModule, lr_weights=1e-3)
    with pytest.raises(UserError, match=r"learn returns masks, and lr_weights trains weights"):
        learn(lm, tokenizer, str(lab.corpus), steps=1, seq_len=32, learner=learner)
