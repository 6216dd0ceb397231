"""ProxSparse: what is trained, when the proximal step comes, which mask follows, and that a run can go on."""

import json
import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers.lab import Batches, brute_top, make_lab, oriented, run, whole_and_resumed
from helpers.tiny_models import tiny_gpt2, tiny_qwen2
from roi_lightning.cli.lightning import build
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import SparseExport
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import SIDECAR

lab = pytest.fixture(make_lab)
RATE, STRENGTH = 1e-3, 4.0
OVERLAY = ["--config", "overlays/proxsparse.yaml"]


def learn(lab, steps, *args, **options):
    """Fit without the command line; the learner and its trainer."""
    optimizer = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)
    settings = {"optimizer": optimizer, "lr_end": RATE / 10, "strength": STRENGTH} | options
    return lab.learn(steps, *args, kind=ProxSparseModule, **settings)


def slow_prox(weight, strength):
    """The proximal point of [out, in] by coordinate descent, in float64; right where strength * |weight| < 3/8."""
    z = weight.double().unflatten(1, (-1, 4))
    assert strength * z.abs().max() < 3 / 8
    w = z.abs()
    for _ in range(200):
        for i in range(4):
            a, b, c = (w[..., j] for j in range(4) if j != i)
            w[..., i] = (z[..., i].abs() - strength * (a * b + b * c + c * a)).clamp(min=0)
    return (w * z.sign()).flatten(1).to(weight.dtype)


def reference(path, targets, batches, parts, steps):
    """ProxSparse in plain PyTorch: the model's own weights are trained; those of the targets by name."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    layers = {name: layer for name, layer in lm.named_modules() if name.endswith(targets)}
    lm.requires_grad_(False)
    weights = [layer.weight.requires_grad_() for layer in layers.values()]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for ids in batches[step * parts : (step + 1) * parts]:
            logits = lm(input_ids=ids).logits[:, :-1]
            (F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for layer in layers.values():
                turn = (lambda x: x) if isinstance(layer, torch.nn.Linear) else torch.t
                layer.weight.copy_(turn(slow_prox(turn(layer.weight), STRENGTH)))
    return {name: turn(layer.weight.detach()) for name, layer in layers.items()}


@pytest.mark.parametrize(("kind", "parts"), [("qwen2", 1), ("gpt2", 3)])
def test_an_optimizer_step_is_followed_by_one_proximal_step(lab, kind, parts):
    if kind == "qwen2":
        model, targets = tiny_qwen2(lab.folder / "model", dtype=torch.float32), ("q_proj", "down_proj")
    else:
        model, targets = tiny_gpt2(lab.folder / "model", attn_pdrop=0, resid_pdrop=0, embd_pdrop=0), ("c_fc",)
    batches = Batches()
    learner, _ = learn(
        lab,
        4,
        model,
        callbacks=[batches],
        trainer={"accumulate_grad_batches": parts},
        targets=[f"*.{target}" for target in targets],
    )
    wanted = reference(model, targets, batches.seen, parts, 4)
    assert learner.tensors.keys() == wanted.keys()
    for name, layer in learner.tensors.items():
        torch.testing.assert_close(layer.learned["master"].detach(), wanted[name], rtol=0, atol=1e-6)
        assert ((layer.learned["master"] == 0) == (wanted[name] == 0)).float().mean() > 0.999
        assert (layer.learned["master"] == 0).any()


def test_the_copies_learn_and_the_weights_do_not(lab):
    learner, trainer = learn(lab, 3, dtype="bfloat16")
    before = AutoModelForCausalLM.from_pretrained(lab.model).state_dict()
    after = learner.teacher.state_dict()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
        assert after[name].dtype == tensor.dtype
    masters = [layer.learned["master"] for layer in learner.tensors.values()]
    trained = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(master) for master in masters}
    for layer in learner.tensors.values():
        assert layer.learned["master"].dtype == torch.float32
        assert not torch.equal(layer.learned["master"], layer.dense.float())


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_the_mask_is_the_top_two_of_the_copies_on_the_original_weights(lab, kind):
    model = lab.model if kind == "qwen2" else tiny_gpt2(lab.folder / "gpt2")
    learner, _ = learn(lab, 3, model, callbacks=[SparseExport(str(lab.folder / "out"))])
    masks, stored = learner.mask_set(), learner.stored_weights
    assert str(masks.pattern) == "2:4"
    plain = load_file(model / "model.safetensors")
    exported = AutoModelForCausalLM.from_pretrained(lab.folder / "out", dtype=learner.teacher.dtype)
    for name, layer in learner.tensors.items():
        mask = brute_top(layer.learned["master"].detach().abs(), 2, 4)
        mask = oriented(layer, mask)
        assert torch.equal(masks.layers[stored[name]].to_bool(), mask), name
        weight = exported.get_submodule(name).weight
        assert torch.equal(weight, plain[stored[name]].to(weight.dtype).masked_fill(~mask, 0)), name
    ids = torch.arange(40).reshape(2, 20) * 5 % 256
    learner.harden()
    with torch.no_grad():
        assert torch.equal(learner.student(ids).logits, exported(ids).logits)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_ends_with_the_same_bits(lab):
    whole_and_resumed(lab.folder, lambda **how: learn(lab, 6, **how)[0])


REFUSED = {
    "2:8": ({"pattern": "2:8"}, r"2:4 only, model\.pattern is 2:8.*set 2:4 or"),
    "no strength": ({"strength": 0.0}, r"model\.strength is 0\.0; it must be a positive"),
    "nan": ({"strength": math.nan}, r"model\.strength is nan"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_why(lab, options, says):
    with pytest.raises(UserError, match=says):
        ProxSparseModule(str(lab.model), **{"strength": 1.0} | options)


def test_a_model_without_a_known_strength_is_refused_before_it_is_read(lab):
    for base in ("quickstart.yaml", "qwen0.5b_2of4.yaml"):
        with pytest.raises(UserError, match=r"none is known for .*/model': set model\.strength \(published"):
            build(["--config", base, *OVERLAY, "--model.lm", str(lab.model)])
    ProxSparseModule(str(lab.model), strength=1.0)


def test_a_run_with_the_overlay(lab):
    assert run("fit", *lab.quick(*OVERLAY, "--model.strength", "5")) == 0
    masks = MaskSet.load(lab.folder / "runs/quickstart+proxsparse/mask.safetensors")
    magnitude = load_file(lab.model / "model.safetensors")
    changed = 0
    for name, mask in masks.layers.items():
        assert masks.pattern.holds(mask.to_bool())
        changed += int((mask.to_bool() != brute_top(magnitude[name].float().abs(), 2, 4)).sum())
    assert changed
    facts = json.loads((lab.folder / "runs/quickstart+proxsparse/export" / SIDECAR).read_text())["training"]
    assert (facts["learner"], facts["method"], facts["strength"]) == ("ProxSparseModule", "proxsparse", 5)
