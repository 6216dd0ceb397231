"""Recovery: what is trained and what stays, against a loop in plain PyTorch; the export, and that a run can go on."""

import json
import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers.directories import export_of
from helpers.lab import Batches, make_lab, run, whole_and_resumed
from helpers.tiny_models import tiny_gpt2, tiny_qwen2
from roi_lightning.contrib.recover import RecoveryModule
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import SparseExport
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import SIDECAR

lab = pytest.fixture(make_lab)
RATE, DECAY, CLIP = 1e-2, 0.1, 0.5


def pruned(lab, builder=tiny_qwen2, **options):
    """A base model, and an export of it under a random mask."""
    source, _, export = export_of(builder(lab.folder / "base", dtype=torch.float32, **options))
    return source.path, export


def recover(lab, export, steps, callbacks=(), trainer=None, **options):
    """Fit without the command line; the learner."""
    optimizer = partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY)
    settings = {"optimizer": optimizer, "lr_end": RATE / 10, "callbacks": callbacks} | options
    clipped = {"gradient_clip_val": CLIP} | (trainer or {})
    return lab.learn(steps, export, kind=RecoveryModule, trainer=clipped, **settings)[0]


def reference(base, export, batches, parts, steps, distillation):
    """The same by hand: pruned weights' gradients are dropped, the others' clipped together."""
    lm, dense = (AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (export, base))
    masks = MaskSet.load(export).layers
    named = dict(lm.named_parameters())
    lm.requires_grad_(False)
    weights = {name: named[name if name in named else f"transformer.{name}"] for name in masks}
    optimizer = torch.optim.AdamW([w.requires_grad_() for w in weights.values()], lr=RATE, weight_decay=DECAY)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for ids in batches[step * parts : (step + 1) * parts]:
            logits = lm(input_ids=ids).logits[:, :-1].flatten(0, 1)
            with torch.no_grad():
                wanted = dense(input_ids=ids).logits[:, :-1].flatten(0, 1).log_softmax(-1)
            nll = F.cross_entropy(logits, ids[:, 1:].flatten())
            kl = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
            (((1 - distillation) * nll + distillation * kl) / parts).backward()
        for name, weight in weights.items():
            weight.grad[~masks[name].to_bool()] = 0
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(("builder", "parts"), [(tiny_qwen2, 1), (tiny_gpt2, 3)])
def test_kept_weights_are_trained_as_by_hand(lab, builder, parts):
    off = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0} if builder is tiny_gpt2 else {}
    base, export = pruned(lab, builder, **off)
    batches, out = Batches(), lab.folder / "recovered"
    steps = {"accumulate_grad_batches": parts}
    learner = recover(lab, export, 4, [batches, SparseExport(str(out))], steps, distillation=0.6)
    wanted = reference(base, export, batches.seen, parts, 4, 0.6)
    written, before = load_file(out / "model.safetensors"), load_file(export / "model.safetensors")
    masks = MaskSet.load(export)
    assert MaskSet.load(out).layers.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=1e-5)
        assert not written[name][~masks.layers[name].to_bool()].any()
        assert not torch.equal(written[name], before[name])
    others = before.keys() - wanted.keys()
    assert all(torch.equal(written[name], before[name]) for name in others)
    assert run("verify", out, "--base", base) == 0
    ids = torch.arange(40).reshape(2, 20) * 5 % 256
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    learner.harden()
    with torch.no_grad():
        torch.testing.assert_close(learner.student(ids).logits, exported(ids).logits)


def test_zeros_are_exact_at_every_step(lab):
    class Zeros(Batches):
        def on_train_batch_end(self, trainer, learner, *args):
            for layer in learner.tensors.values():
                pruned = layer.learned["kept"][~learner.hard_mask(layer)]
                assert not pruned.view(torch.int32).any(), "every bit is zero"
                self.seen.append(len(pruned))

    zeros = Zeros()
    noisy = partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)
    _, export = pruned(lab)
    recover(lab, export, 5, [zeros], optimizer=noisy)
    assert len(zeros.seen) == 5 * len(MaskSet.load(export).layers)


def test_mixed_patterns_and_layers_left_alone_stay_as_they_are(lab):
    options = ["--method", "magnitude", "--patterns", '{"*.down_proj": "1:4", "k_proj": dense}']
    assert run("prune", lab.model, *options, "--ignore", "o_proj", "--out", lab.folder / "mixed") == 0
    out = lab.folder / "out"
    learner = recover(lab, lab.folder / "mixed", 2, [SparseExport(str(out))])
    before, after = MaskSet.load(lab.folder / "mixed"), MaskSet.load(out)
    assert before.pattern == after.pattern
    assert before.dense == after.dense
    assert not any("o_proj" in name or "k_proj" in name for name in learner.tensors)
    assert learner.kept_of_prunable == (
        before.kept + sum(before.dense.values()),
        before.total + sum(before.dense.values()),
    )
    for name, layer in before.layers.items():
        assert torch.equal(layer.packed, after.layers[name].packed)
    assert run("verify", out, "--base", lab.model) == 0


def test_weights_that_pruning_changed_are_where_it_starts(lab):
    options = ["--method", "sparsegpt", "--corpora", lab.corpus, "--windows", 4, "--seq_len", 32]
    assert run("prune", lab.model, *options, "--out", lab.folder / "sparsegpt") == 0
    learner = RecoveryModule(str(lab.folder / "sparsegpt"))
    learner.configure_model()
    ids = torch.arange(40).reshape(2, 20) * 5 % 256
    exported = AutoModelForCausalLM.from_pretrained(
        lab.folder / "sparsegpt", dtype=next(learner.teacher.parameters()).dtype
    )
    learner.harden()
    with torch.no_grad():
        assert torch.equal(learner.student(ids).logits, exported(ids).logits)


def test_a_run_of_the_shipped_configuration(lab, capsys):
    _, export = pruned(lab)
    options = lab.options(model=export)
    assert run("fit", "--config", "recover.yaml", *options, "--run", "again") == 0
    folder = lab.folder / "runs" / "again"
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["perplexity"]) == ["dense", "magnitude", "mask only", "recovered"]
    sidecar = json.loads((folder / "export" / SIDECAR).read_text())
    assert sidecar["updated"] == list(sidecar["layers"])
    assert sidecar["training"]["method"] == "recovered"
    assert sidecar["training"]["export"] == str(export)
    assert "trained on" in (folder / "export" / "README.md").read_text()
    capsys.readouterr()
    assert run("apply", lab.folder / "base", folder / "mask.safetensors", "--out", lab.folder / "no") == 1
    assert "belong to weights that their method updated" in capsys.readouterr().err
    assert run("plan", "--config", "recover.yaml", *options) == 0
    assert "weights to learn" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_ends_with_the_same_bits(lab):
    _, export = pruned(lab)
    whole_and_resumed(lab.folder, partial(recover, lab, export, 6))


def test_what_is_no_export_is_refused(lab):
    with pytest.raises(
        UserError, match=r"no exported directory, and only the kept weights of one can be trained on"
    ):
        RecoveryModule(str(lab.model))
    with pytest.raises(UserError, match=r"'smollm2-135m' is no exported directory"):
        RecoveryModule("smollm2-135m")


def test_another_base_is_refused(lab):
    _, export = pruned(lab)
    other = tiny_qwen2(lab.folder / "other", hidden_size=128)
    with pytest.raises(UserError, match=r"was not made from .*other.*name the dense model.*\(base\)"):
        recover(lab, export, 1, base=str(other))
    alike = tiny_qwen2(lab.folder / "alike", seed=1, dtype=torch.float32)
    with pytest.raises(UserError, match=r"has other values"):
        recover(lab, export, 1, base=str(alike))
