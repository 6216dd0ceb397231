"""A run whose loss or gradients are no numbers stops, says where, and names the way back."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from helpers.lab import make_lab
from roi_lightning.errors import UserError
from roi_lightning.learning import optim
from roi_lightning.learning.optim import check_finite_step

lab = pytest.fixture(make_lab)
LAYER = "lm.model.layers.1.mlp.up_proj.logits"


class Spoil(Callback):
    """Puts a value into one gradient of one layer after the backward passes of given optimizer steps."""

    def __init__(self, value, steps):
        self.value, self.steps, self.seen = value, steps, []

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step in self.steps:
            dict(pl_module.learned_parameters())[LAYER].grad[3, 5] = self.value

    def on_train_batch_end(self, trainer, pl_module, *args):
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.seen.append(None if scaler is None else scaler.get_scale())


def saver(lab):
    return ModelCheckpoint(dirpath=lab.folder / "saved", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize(("value", "accumulate"), [(float("nan"), 1), (-float("inf"), 2)])
def test_a_gradient_that_is_nan_stops_the_run(lab, value, accumulate):
    trainer = {"enable_checkpointing": True, "accumulate_grad_batches": accumulate}
    says = rf"the gradient of {LAYER} is not finite at optimizer step 5; .*saved/epoch=0-step=5\.ckpt"
    with pytest.raises(UserError, match=says):
        lab.learn(8, callbacks=[saver(lab), Spoil(value, {5})], trainer=trainer)


def test_a_gpu_is_asked_where_lightning_logs_and_before_a_checkpoint(lab, monkeypatch):
    def put_off(trainer, norm):
        return (trainer.global_step + 1) % 4 != 0

    monkeypatch.setattr(optim, "_is_put_off", put_off)
    with pytest.raises(UserError, match="is not finite at optimizer step 3; start again"):
        lab.learn(8, callbacks=[Spoil(float("nan"), {1})])
    keeper = ModelCheckpoint(dirpath=lab.folder / "saved", every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(
        UserError, match="a loss or gradient was not finite before optimizer step 2; start again with"
    ):
        lab.learn(8, callbacks=[keeper, Spoil(float("nan"), {1})], trainer={"enable_checkpointing": True})
    assert not list(lab.folder.rglob("*.ckpt"))


def test_a_loss_that_is_nan_stops_the_run_whichever_micro_batch_it_is_of(lab):
    class Break(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                with torch.no_grad():
                    dict(pl_module.learned_parameters())[LAYER][0] = float("nan")

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                with torch.no_grad():
                    dict(pl_module.learned_parameters())[LAYER][0] = 0.0

    with pytest.raises(UserError, match=r"^the loss is not finite at optimizer step 1;"):
        lab.learn(3, callbacks=[Break()], trainer={"accumulate_grad_batches": 2})


def with_scaler(lab, steps, spoiled, **options):
    scaler = torch.amp.GradScaler("cpu", **options)
    spoil = Spoil(float("inf"), spoiled)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    learner, _ = lab.learn(steps, callbacks=[spoil], trainer={"plugins": [plugin]}, dtype="float32")
    return learner, spoil.seen


def test_a_step_that_the_scaler_skips_is_no_error(lab):
    start = 2.0**10
    learner, scales = with_scaler(lab, 4, {1, 2}, init_scale=start)
    assert scales == [start, start / 2, start / 4, start / 4]
    assert all(layer.learned["logits"].isfinite().all() for layer in learner.tensors.values())


def test_a_scale_below_one_is_not_to_blame(lab):
    with pytest.raises(UserError, match=f"the gradient of {LAYER} is not finite at optimizer step 3"):
        with_scaler(lab, 8, set(range(1, 8)), init_scale=2.0)


def test_large_gradients_are_numbers():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 1e30)
    trainer = SimpleNamespace(precision_plugin=None, global_step=0, strategy=SingleDeviceStrategy())
    check_finite_step(trainer, True, [("a", parameter)])
    parameter.grad[2] = float("inf")
    trainer.checkpoint_callbacks, trainer.ckpt_path = [], None
    with pytest.raises(UserError, match="the gradient of a is not finite"):
        check_finite_step(trainer, True, [("a", parameter)])
