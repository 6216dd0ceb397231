"""Callbacks: the files and numbers they leave, checked by other means."""

import io
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.lab import brute_top, make_lab, new_lab, oriented, run
from helpers.tiny_models import tiny_gpt2
from roi_lightning.learning.callbacks import (
    HardenMasks,
    MaskMonitor,
    PlainProgress,
    SparseExport,
)
from roi_lightning.learning.callbacks.monitor import normalised_entropy, settled_groups
from roi_lightning.masks.mask_set import MaskSet

lab = pytest.fixture(make_lab)
pytestmark = pytest.mark.filterwarnings("ignore:the first draws keep")  # at the default temperatures


class Snapshots(Callback):
    """Logits as they were before training and after every step."""

    def __init__(self):
        self.logits = {}

    def on_train_start(self, trainer, pl_module):
        self.take(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.take(trainer, pl_module)

    def take(self, trainer, learner):
        self.logits[trainer.global_step] = {
            name: layer.learned["logits"].detach().clone() for name, layer in learner.tensors.items()
        }


@pytest.mark.parametrize("model", ["qwen2", "gpt2"])
def test_files_and_export_have_the_top_of_the_logits(lab, model):
    shots = Snapshots()
    base = tiny_gpt2(lab.folder / "gpt2") if model == "gpt2" else lab.model
    out = lab.folder / "deep" / "out"
    callbacks = [shots, SparseExport(str(out)), HardenMasks(every_n_steps=2)]
    learner, _ = lab.learn(5, model=base, callbacks=callbacks)
    names = {path.name for path in (lab.folder / "masks").iterdir()}
    assert names == {"step-000002.safetensors", "step-000004.safetensors"}
    files = [(2, "masks/step-000002.safetensors"), (4, "masks/step-000004.safetensors")]
    files += [(5, "mask.safetensors"), (5, out)]
    stored = learner.stored_weights
    for step, file in files:
        masks = MaskSet.load(lab.folder / file)
        for name, logits in shots.logits[step].items():
            got = oriented(learner.tensors[name], masks.layers[stored[name]].to_bool())
            assert torch.equal(got, brute_top(logits, 2, 4)), (step, name)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    lab, shots = new_lab(tmp_path_factory), Snapshots()
    logger = TensorBoardLogger(lab.folder, name="", version="", default_hp_metric=False)
    trainer = {
        "logger": logger,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 1,
        "limit_val_batches": 1.0,
        "check_val_every_n_epoch": None,
        "val_check_interval": 12,
    }
    learner, _ = lab.learn(
        6,
        lr=0.05,
        lr_end=0.01,
        prior="magnitude",
        trainer=trainer,
        callbacks=[shots, MaskMonitor(every_n_steps=2)],
    )
    events = EventAccumulator(str(lab.folder), {"scalars": 0, "images": 0, "histograms": 0})
    events.Reload()
    return learner, shots.logits, events


def scalars(events, tag):
    return {event.step: event.value for event in events.Scalars(tag)}


def test_monitor_leaves_every_tag(watched):
    learner, _, events = watched
    tags = events.Tags()
    wanted = {"mask/entropy", "mask/settled", "mask/flips", "mask/flips_from_prior"}
    wanted |= {"anneal/tau", "anneal/lambda", "lr", "tokens/seen", "tokens/per_second", "memory/peak_gib"}
    assert wanted | {"train/loss", "val/nll", "val/perplexity"} <= set(tags["scalars"])
    kinds = {name.split(".")[-1] for name in learner.tensors}
    assert set(tags["histograms"]) == {f"logits/{kind}" for kind in kinds}
    blocks = [f"mask/model.layers.{i}" for i in (0, 1)]
    shown = {
        f"{b}.{layer}" for b in blocks for layer in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    }
    assert set(tags["images"]) == shown


def test_monitor_numbers_agree_with_slow_ones(watched):
    learner, logits, events = watched
    looks = [0, 2, 4, 6]
    masks = {step: {k: brute_top(x, 2, 4) for k, x in logits[step].items()} for step in looks}
    prior = {k: m.to_bool() for k, m in learner.prior_masks.items()}
    everywhere = scalars(events, "mask/flips_from_prior")
    assert list(everywhere) == looks
    for step in looks:
        assert everywhere[step] == pytest.approx(flips(prior, masks[step]), abs=1e-6)
        lam, tau = max(0.002, 0.002 ** (step / 4.5)), max(0.05, 0.05 ** (step / 4.5))
        assert scalars(events, "anneal/lambda")[step] == pytest.approx(lam, rel=1e-5)
        assert scalars(events, "anneal/tau")[step] == pytest.approx(tau, rel=1e-5)
        picks = [(x.double().reshape(-1, 4) / lam).softmax(-1) for x in logits[step].values()]
        entropy = [float(-(p * p.clamp_min(1e-300).log()).sum(-1).mean()) / np.log(4) for p in picks]
        assert scalars(events, "mask/entropy")[step] == pytest.approx(np.mean(entropy), abs=1e-4)
        wanted = 0.01 + 0.02 * (1 + np.cos(np.pi * step / 6))
        assert scalars(events, "lr")[step] == pytest.approx(wanted, rel=1e-4)
    assert everywhere[0] > 0, "noise of 0.01 against a prior of 0.015"
    between = {b: flips(masks[a], masks[b]) for a, b in pairwise(looks)}
    assert scalars(events, "mask/flips") == pytest.approx(between, abs=1e-6)
    # Two windows of 32 tokens in each of two micro-batches.
    assert scalars(events, "tokens/seen") == {step: step * 2 * 2 * 32 for step in (2, 4, 6)}
    assert all(value > 0 for value in scalars(events, "tokens/per_second").values())


def flips(before, after):
    kept = sum(int(mask.sum()) for mask in after.values())
    return sum(int((mask & ~before[name]).sum()) for name, mask in after.items()) / kept


def test_monitor_pictures_are_eight_by_eight(watched):
    _, logits, events = watched
    name = "model.layers.0.self_attn.q_proj"
    last = events.Images(f"mask/{name}")[-1]
    picture = np.asarray(Image.open(io.BytesIO(last.encoded_image_string)).convert("L"))
    assert picture.shape[0] == picture.shape[1]
    side = picture.shape[0] // 8
    centres = picture[side // 2 :: side, side // 2 :: side]
    assert np.array_equal(centres < 128, brute_top(logits[6][name][:8], 2, 4)[:, :8].numpy())


def test_entropy_and_settled_groups_at_their_ends():
    assert float(normalised_entropy(torch.zeros(3, 8), 0.5)) == pytest.approx(1.0)
    assert float(normalised_entropy(torch.eye(4) * 50, 0.5)) == pytest.approx(0.0, abs=1e-6)
    assert float(settled_groups(torch.zeros(3, 8), 2, 0.5)) == 0
    logits = torch.tensor([[9.0, 8.0, 0.0, 0.0], [9.0, 0.1, 0.0, 0.0]])
    assert float(settled_groups(logits, 2, 1.0)) == 0.5


def test_a_foreign_directory_is_refused_before_the_first_step(lab, capsys, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "roi_lightning.learning.roi.RoILightningModule.prepare_step", lambda *a: steps.append(a)
    )
    out = lab.folder / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    override = ["--trainer.callbacks", "SparseExport", "--trainer.callbacks.out", str(out)]
    assert run("fit", *lab.quick(*override)) == 1
    assert "was not written by roi_lightning" in capsys.readouterr().err
    assert not steps
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_plain_progress_tells_rate_and_time_left(lab, capsys):
    trainer = {"enable_progress_bar": True, "accumulate_grad_batches": 2}
    lab.learn(4, callbacks=[PlainProgress(every_seconds=0)], trainer=trainer)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    pattern = r"(step \d/4(?: \+ micro-batch 1/2)?)  \d+\.\d\d s/step  \d+:\d\d:\d\d left(  train/loss \d.*)?"
    told = [re.fullmatch(pattern, line) for line in lines]
    half = [f"step {step}/4 + micro-batch 1/2" for step in range(4)]
    whole = [f"step {step}/4" for step in range(1, 5)]
    assert [found and found[1] for found in told] == [
        line for pair in zip(half, whole, strict=True) for line in pair
    ]
    lab.learn(2, callbacks=[PlainProgress(every_seconds=1e9)], trainer={"enable_progress_bar": True})
    last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line[:8] for line in last] == ["step 2/2"], "the end is always told, and once"


def test_plain_progress_counts_validation(lab, capsys):
    settings = {"enable_progress_bar": True, "limit_val_batches": 1.0}
    learner, trainer = lab.learn(2, callbacks=[PlainProgress(every_seconds=0)], trainer=settings)
    capsys.readouterr()
    trainer.validate(learner, datamodule=lab.data(val_batch_size=2))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("validation ")]
    assert [line.split("  ")[0] for line in lines] == ["validation 1/3", "validation 2/3", "validation 3/3"]
    assert lines[-1].endswith("  0:00:00 left")
