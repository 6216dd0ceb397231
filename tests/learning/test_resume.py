"""An interrupted run that goes on ends where an uninterrupted one does, to the bit."""

import math

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import roi_lightning.learning.roi
import roi_lightning.oneshot
from helpers.lab import GOING_ON, CutAt, PowerCutError, make_lab, run
from roi_lightning.data import Corpus
from roi_lightning.learning.callbacks import HardenMasks, StraightThroughToggle
from roi_lightning.samplers import GumbelTopK, StraightThrough

lab = pytest.fixture(make_lab)
STEPS = 6
pytestmark = [*GOING_ON, pytest.mark.filterwarnings("ignore:the first draws keep")]


@pytest.fixture
def measured(monkeypatch):
    """How often the activation prior was measured."""
    calls, prune = [], roi_lightning.oneshot.prune_layers

    def counting(*args, **kwargs):
        calls.append(1)
        return prune(*args, **kwargs)

    monkeypatch.setattr(roi_lightning.oneshot, "prune_layers", counting)
    return calls


def learn(lab, name, *more, ckpt_path=None, streaming=False):
    """Six steps with everything that has state: accumulation, prior, a switch of estimator at step 4."""
    callbacks = [HardenMasks(), StraightThroughToggle(4), checkpoints(lab.folder / name), *more]
    trainer = {
        "accumulate_grad_batches": 2,
        "default_root_dir": str(lab.folder / name),
        "enable_checkpointing": True,
    }
    options = {"prior": "activation", "prior_windows": 2, "ckpt_path": ckpt_path}
    data = lab.data(corpora=[Corpus(str(lab.corpus), streaming=streaming)])
    return lab.learn(STEPS, callbacks=callbacks, trainer=trainer, data=data, **options)[0]


def checkpoints(folder):
    return ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=3, save_top_k=-1)


def interrupted(lab, **options):
    with pytest.raises(PowerCutError):
        learn(lab, "cut", CutAt(4), **options)
    return lab.folder / "cut" / "checkpoints" / "step=3.ckpt"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_resumed_run_ends_with_the_same_bits(lab, measured, streaming):
    whole = learn(lab, "whole", streaming=streaming)
    assert len(measured) == 1
    checkpoint = interrupted(lab, streaming=streaming)
    assert len(measured) == 2
    resumed = learn(lab, "cut", ckpt_path=str(checkpoint), streaming=streaming)
    assert len(measured) == 2, "the prior belongs to the start of a run"
    for name, layer in whole.tensors.items():
        assert torch.equal(layer.learned["logits"], resumed.tensors[name].learned["logits"]), name
        assert torch.equal(whole.prior_masks[name].packed, resumed.prior_masks[name].packed)
    files = [lab.folder / name / "mask.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert type(whole.current_sampler) is type(resumed.current_sampler) is StraightThrough


def test_the_command_line_counts_and_not_the_checkpoint(lab, monkeypatch):
    checkpoint = interrupted(lab)
    seen = []
    original = roi_lightning.learning.roi.RoILightningModule.prepare_step

    def watching(self, batch_idx):
        original(self, batch_idx)
        group = self.trainer.optimizers[0].param_groups[0]
        seen.append(
            (
                self.trainer.global_step,
                next(iter(self.draws.values())).tau,
                type(self.current_sampler),
                group["lr"],
            )
        )

    monkeypatch.setattr(roi_lightning.learning.roi.RoILightningModule, "prepare_step", watching)
    changed = ["--model.tau", "Constant", "--model.tau.value", "0.7", "--model.sampler", "StraightThrough"]
    changed += [
        "--model.optimizer.lr",
        "0.005",
        "--model.lr_end",
        "0.0001",
        "--ckpt_path",
        checkpoint,
        "--allow_changed_settings",
    ]
    assert run("fit", *lab.quick(*changed, max_steps=STEPS, accumulate=2)) == 0
    assert [step for step, *_ in seen] == [3, 3, 4, 4, 5, 5]
    assert {tau for _, tau, *_ in seen} == {0.7}
    assert {sampler for *_, sampler, _ in seen} == {StraightThrough}
    # A cosine from the new 0.005 to 0.0001 over the six steps.
    wanted = [0.0001 + 0.00245 * (1 + math.cos(math.pi * step / STEPS)) for step, *_ in seen]
    assert [rate for *_, rate in seen] == pytest.approx(wanted)


@pytest.mark.parametrize("to", ["soft", "straight_through"])
def test_which_estimator_is_used_depends_on_the_step_alone(lab, to):
    start = StraightThrough() if to == "soft" else GumbelTopK()
    seen = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen[trainer.global_step] = type(pl_module.current_sampler)

    callbacks = [StraightThroughToggle(3, to), Watch()]
    lab.learn(5, callbacks=callbacks, sampler=start)
    after = GumbelTopK if to == "soft" else StraightThrough
    # Step k ends with the count k + 1; the switch is in force from step 3 on.
    assert seen == dict.fromkeys((1, 2, 3), type(start)) | dict.fromkeys((4, 5), after)
