"""MaskPro: its steps in plain PyTorch, the best mask of problems small enough to try all, and runs that resume."""

import json
import math
from functools import partial
from itertools import combinations, product

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers.lab import GOING_ON, brute_top, make_lab, run, whole_and_resumed
from helpers.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen2
from roi_lightning.contrib.maskpro import MaskProModule
from roi_lightning.errors import UserError
from roi_lightning.evaluation.perplexity import token_perplexity
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import SIDECAR
from roi_lightning.samplers.noise import noise_key, uniform

lab = pytest.fixture(make_lab)
pytestmark = [*GOING_ON, pytest.mark.filterwarnings("ignore:the first draws keep")]
RATE = 50.0
OVERLAY = ["--config", "overlays/maskpro.yaml"]


def sgd(rate):
    return partial(torch.optim.SGD, lr=rate)


def learn(lab, steps, *args, **options):
    """Fit without the command line; the learner."""
    settings = {"optimizer": sgd(RATE), "lr_end": RATE, "prior": "magnitude", "dtype": "float32"} | options
    return lab.learn(steps, *args, kind=MaskProModule, **settings)[0]


class Watch(Callback):
    """The micro-batches of a run, and the logits before every optimizer step."""

    def __init__(self):
        self.batches, self.logits = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["input_ids"].clone())
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.logits.append(
                {name: x.learned["logits"].detach().clone() for name, x in pl_module.tensors.items()}
            )


def noise_of(step, name, shape):
    index = torch.arange(math.prod(shape), dtype=torch.int32)
    return -torch.log(-torch.log(uniform(index, noise_key(0, step, name)))).view(shape)


def log_probability(logits, keys, n, m):
    """Of the ordered draw of the n largest keys of each group, summed over groups."""
    logits, keys = (x.double().unflatten(-1, (-1, m)) for x in (logits, keys))
    order = keys.argsort(-1, descending=True)
    ranked = logits.gather(-1, order)
    return sum((ranked[..., k] - ranked[..., k:].logsumexp(-1)).sum() for k in range(n))


def reference_run(path, targets, start, batches, parts, steps, renew_every):
    """MaskPro at 2:4 in plain PyTorch, by autograd through the probability of each draw; the final logits."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    layers = {name: layer for name, layer in lm.named_modules() if name.endswith(targets)}
    turn = {name: (lambda x: x) if isinstance(x, torch.nn.Linear) else torch.t for name, x in layers.items()}
    dense = {name: turn[name](layer.weight.detach().clone()) for name, layer in layers.items()}
    logits = {name: x.clone() for name, x in start.items()}
    best = {name: brute_top(x.abs(), 2, 4) for name, x in dense.items()}
    past = []

    def loss(masks, texts):
        with torch.no_grad():
            for name, layer in layers.items():
                layer.weight.copy_(turn[name](dense[name] * masks[name]))
            of = [lm(input_ids=ids).logits[:, :-1].flatten(0, 1) for ids in texts]
            each = [F.cross_entropy(x, ids[:, 1:].flatten()) for x, ids in zip(of, texts, strict=True)]
        return sum(map(float, each)) / len(each)

    for step in range(steps):
        if step and step % renew_every == 0:
            best, past = {name: brute_top(x, 2, 4) for name, x in logits.items()}, []
        texts = batches[step * parts : (step + 1) * parts]
        keys = {name: x + noise_of(step, name, x.shape) for name, x in logits.items()}
        drawn = {name: brute_top(x, 2, 4) for name, x in keys.items()}
        residual = loss(drawn, texts) - loss(best, texts)
        weights = [0.9**age for age in range(len(past))][::-1]
        delta = sum(w * r for w, r in zip(weights, past, strict=True)) / sum(weights) if past else residual
        past.append(residual)
        for name in logits:
            own = logits[name].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(log_probability(own, keys[name], 2, 4), own)
            logits[name] -= RATE * (residual - delta) * gradient
    return logits


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen2", 3),
        ("gpt2", 1),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("qwen2", 1), ("gpt2", 3))),
    ],
)
def test_steps_are_those_of_plain_torch(lab, monkeypatch, kind, parts):
    if kind == "qwen2":
        model, targets = tiny_qwen2(lab.folder / "model", dtype=torch.float32), ("q_proj", "down_proj")
    else:
        model, targets = tiny_gpt2(lab.folder / "model", attn_pdrop=0, resid_pdrop=0, embd_pdrop=0), ("c_fc",)
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_: pytest.fail("a backward pass"))
    watch = Watch()
    learner = learn(
        lab,
        5,
        model,
        callbacks=[watch],
        trainer={"accumulate_grad_batches": parts},
        targets=[f"*.{target}" for target in targets],
        prior_strength=0.5,
        average=0.9,
        renew_every=3,
    )
    start, *later = watch.logits
    wanted = reference_run(model, targets, start, watch.batches, parts, 5, renew_every=3)
    assert learner.tensors.keys() == wanted.keys()
    for name, layer in learner.tensors.items():
        torch.testing.assert_close(layer.learned["logits"].detach(), wanted[name], rtol=0, atol=2e-4)
        assert (layer.learned["logits"].detach() - start[name]).abs().max() > 0.01
        unmoved = [torch.equal(a[name], b[name]) for a, b in zip(watch.logits, later, strict=False)]
        assert unmoved == [True, False, False, True], "nothing to compare with: the first step, and a renewal"
    assert all(p.grad is None for p in learner.parameters())


# Of a layer with two groups, and of one with a single group.
SMALL = {"1:4": ("v_proj", {"intermediate_size": 4}), "2:4": ("up_proj", {"intermediate_size": 1})}


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "layer", "sizes"), [(x, *SMALL[x]) for x in SMALL])
def test_the_best_of_all_masks_is_found(lab, spec, layer, sizes):
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "num_hidden_layers": 1}
    model = tiny_llama(lab.folder / "model", hidden_size=4, initializer_range=1.0, **heads, **sizes)
    data, rates = lab.data(batch_size=8), {"optimizer": sgd(1.0), "lr_end": 0.5}
    options = {"targets": [f"*.{layer}"], "pattern": spec, "prior": "none", "renew_every": 50}
    learner = learn(lab, 120, model, data=data, **options, **rates)
    ((name, learned),) = learner.tensors.items()
    windows = data.windows("train", 64).split(16)
    groups = [tuple(i in kept for i in range(4)) for kept in combinations(range(4), learner.pattern.n)]
    found = {}
    for mask in product(groups, repeat=len(learned.dense)):
        student = learner.harden({name: LayerMask.from_rows(torch.tensor(mask))})
        found[mask] = token_perplexity(student, windows)
    best = min(found, key=found.get)
    assert learner.hard_mask(learned).tolist() == list(map(list, best))
    assert brute_top(learned.dense.abs(), learner.pattern.n, 4).tolist() != list(map(list, best))


@pytest.mark.parametrize("saved", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_same_bits(lab, saved):
    """From a checkpoint just before a renewal, and from one between two."""
    whole, resumed = whole_and_resumed(lab.folder, partial(learn, lab, 6, renew_every=3), saved)
    assert resumed._delta == whole._delta
    for name, mask in whole._reference.items():
        assert torch.equal(mask.packed, resumed._reference[name].packed), name


def test_a_checkpoint_of_another_learner_of_logits_is_refused(lab):
    saves = ModelCheckpoint(lab.folder / "roi", "{step}", every_n_train_steps=1)
    lab.learn(1, callbacks=[saves], trainer={"enable_checkpointing": True})
    with pytest.raises(UserError, match="of another learner; give one of a run of MaskProModule"):
        learn(lab, 2, ckpt_path=saves.best_model_path, allow_changed_settings=True)


def test_a_run_with_the_overlay_ends_in_a_verified_export(lab):
    rate = ["--model.optimizer.lr", "30"]
    assert run("fit", *lab.quick(*OVERLAY, *rate, "--model.prior_strength", "1")) == 0
    folder = lab.folder / "runs/quickstart+maskpro"
    assert run("verify", folder / "export") == 0
    masks = MaskSet.load(folder / "mask.safetensors")
    prior = json.loads((folder / "summary.json").read_text())["perplexity"]
    assert list(prior) == ["dense", "magnitude", "activation", "maskpro"]
    assert all(masks.pattern.holds(mask.to_bool()) for mask in masks.layers.values())
    facts = json.loads((folder / "export" / SIDECAR).read_text())["training"]
    assert (facts["learner"], facts["method"], facts["prior"]) == ("MaskProModule", "maskpro", "activation")
    assert (facts["average"], facts["renew_every"]) == (0.99, 100)
