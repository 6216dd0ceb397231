"""The record that every run keeps: what it says is what happened, also of runs that did not end well."""

import os
import signal
from importlib.metadata import version

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from cli_helpers import GOING_ON, make_lab
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import KeepRecord, MaskMonitor
from roi_lightning.learning.callbacks.interruption import PreemptedError
from roi_lightning.reports import read_record

lab = pytest.fixture(make_lab)
pytestmark = [*GOING_ON, pytest.mark.filterwarnings("ignore:the first draws keep")]


class At(Callback):
    """Does something after an optimizer step, and keeps the losses of all."""

    def __init__(self, step=None, act=None):
        self.step, self.act, self.losses = step, act, {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])
        if trainer.global_step == self.step:
            self.act()


def told_to_end():  # noticed after the next step
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted():
    raise KeyboardInterrupt


def learn(lab, name, *more, steps=5, **options):
    """With a checkpoint after every second step, and no logger."""
    folder = lab.folder / name
    kept = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=2)
    settings = {"enable_checkpointing": True, "log_every_n_steps": 1, "default_root_dir": str(folder)}
    learner, _ = lab.learn(steps, callbacks=[*more, KeepRecord(), kept], trainer=settings, **options)
    return learner


def record(lab, name):
    return read_record(lab.folder / name)


def test_a_run_is_recorded_as_it_was(lab):
    seen = At()
    learner = learn(lab, "run", MaskMonitor(every_n_steps=2), seen, seed=3)
    found = record(lab, "run")
    (leg,) = found.legs
    assert dict(found.curves["train/loss"]) == pytest.approx(seen.losses)
    assert [step for step, _ in found.curves["mask/entropy"]] == [0, 2, 4, 5]
    assert found.curves["tokens/seen"] == [(step, step * 2.0 * 32) for step in (2, 4, 5)]
    assert all(0 < value < 1024 for _, value in found.curves["memory/peak_gib"])
    assert (leg.start["step"], leg.start["max_steps"], leg.start["seed"]) == (0, 5, 3)
    assert leg.start["versions"]["torch"] == version("torch")
    run = leg.start["run"]
    weights = sum(layer.logits.numel() for layer in learner.layers.values())
    assert (run["learned_parameters"], run["masked_weights"]) == (weights, weights)
    assert (run["windows_per_step"], run["tokens_per_step"]) == (2, 64)
    assert run["corpora"] == [str(lab.corpus)]
    assert run["settings"] == learner.run_recipe
    assert (leg.status, leg.end["step"], leg.end["message"]) == ("finished", 5, None)


def test_a_run_that_was_told_to_end_goes_on_in_the_same_record(lab):
    whole = At()
    learn(lab, "whole", whole)
    with pytest.raises(PreemptedError):
        learn(lab, "told", At(2, told_to_end))
    assert [leg.status for leg in record(lab, "told").legs] == ["interrupted"]
    learn(lab, "told", resume="auto")
    found = record(lab, "told")
    first, second = found.legs
    assert (first.end["step"], second.start["step"], second.status) == (3, 3, "finished")
    assert second.start["resumed_from"].endswith("checkpoints/step=3.ckpt")
    # Lightning logs a step after the hook in which the run ends.
    expected = {step: loss for step, loss in whole.losses.items() if step != 3}
    assert dict(found.curves["train/loss"]) == pytest.approx(expected)


def test_a_run_that_resumes_from_its_last_step_is_a_leg(lab):
    learn(lab, "run", steps=4)
    learn(lab, "run", steps=4, resume="auto", overwrite=False)
    legs = record(lab, "run").legs
    assert [(leg.start["step"], leg.status, leg.end["step"]) for leg in legs] == [
        (0, "finished", 4),
        (4, "finished", 4),
    ]


def test_a_run_that_fails_says_of_what(lab):
    class Spoil(Callback):
        def on_after_backward(self, trainer, pl_module):
            if trainer.global_step == 1:
                next(p for p in pl_module.parameters() if p.grad is not None).grad.fill_(float("nan"))

    with pytest.raises(UserError) as caught:
        learn(lab, "run", Spoil())
    (leg,) = record(lab, "run").legs
    assert (leg.status, leg.end["step"], leg.end["message"]) == ("failed", 1, str(caught.value))
    assert "is not finite at optimizer step 1" in leg.end["message"]


def test_the_keyboard_interrupts(lab):
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            learn(lab, "run", At(2, interrupted))
    finally:
        signal.signal(signal.SIGINT, handler)
    (leg,) = record(lab, "run").legs
    assert (leg.status, leg.end["step"]) == ("interrupted", 2)
