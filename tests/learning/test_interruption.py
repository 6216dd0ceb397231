"""Runs that are told to end lose no step, and go on by themselves to the same bits."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.lab import GOING_ON, make_lab, new_lab, run
from roi_lightning.learning.callbacks import HardenMasks
from roi_lightning.learning.callbacks.interruption import Preemption

lab = pytest.fixture(make_lab)
STEPS = 5
TERM, CTRL_C = signal.SIGTERM, signal.SIGINT
pytestmark = GOING_ON


class TellAt(Callback):
    """Sends a signal to this process at one call of one hook; Ctrl-C after it would kill the process."""

    def __init__(self, hook, call, number):
        self.left, self.number = call, number
        setattr(self, hook, self._count)

    def _count(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
            assert signal.getsignal(CTRL_C) == signal.SIG_DFL


class Steps(Callback):
    def __init__(self):
        self.micro_batches, self.steps, self.validations = [], [], {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.micro_batches.append(batch["input_ids"].sum().item())
        self.steps.append(trainer.global_step)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validations[trainer.global_step] = trainer.callback_metrics["val/perplexity"].item()


def learn(lab, name, *more, accumulate=2, **trainer):
    folder = lab.folder / name
    callbacks = [HardenMasks(), *more]
    callbacks.append(
        ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=2, save_last="link")
    )
    settings = {
        "accumulate_grad_batches": accumulate,
        "default_root_dir": str(folder),
        "enable_checkpointing": True,
        "limit_val_batches": 1,
        "val_check_interval": 3 * accumulate,
    }
    return lab.learn(STEPS, callbacks=callbacks, trainer=settings | trainer, resume="auto")[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    lab, seen = new_lab(tmp_path_factory), Steps()
    learn(lab, "whole", seen)
    return seen, (lab.folder / "whole" / "mask.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("hook", "call", "number", "saved"),
    [
        ("on_train_batch_start", 2, CTRL_C, 1),
        pytest.param("on_before_optimizer_step", 2, TERM, 2, marks=pytest.mark.slow),
        ("on_train_batch_end", 5, TERM, 3),
        ("on_validation_end", 1, TERM, 3),
        ("on_save_checkpoint", 1, TERM, 2),
        pytest.param("on_train_batch_end", 2 * STEPS, TERM, 5, marks=pytest.mark.slow),
        ("on_train_end", 1, CTRL_C, 5),
    ],
)
def test_no_step_is_lost(lab, whole, caplog, hook, call, number, saved):
    before, mask = whole
    seen, rest = Steps(), Steps()
    handlers = [signal.getsignal(each) for each in (TERM, CTRL_C)]
    with pytest.raises(SystemExit) as ended:
        learn(lab, "told", seen, TellAt(hook, call, number))
    status, by = {TERM: (143, "SIGTERM"), CTRL_C: (130, "Ctrl-C")}[number]
    assert ended.value.code == status
    assert f"ended by {by}; step {saved} is saved: {lab.folder}/told/checkpoints/step={saved}" in caplog.text
    assert [signal.getsignal(each) for each in (TERM, CTRL_C)] == handlers
    folder = lab.folder / "told" / "checkpoints"
    kept = [torch.load(file, weights_only=True)["global_step"] for file in folder.glob("[!.]*.ckpt")]
    assert max(kept, default=0) == saved
    learn(lab, "told", rest)
    assert rest.steps[:1] == ([saved] if saved < STEPS else [])
    assert seen.micro_batches[: 2 * saved] + rest.micro_batches == before.micro_batches
    assert seen.validations | rest.validations == before.validations
    assert (lab.folder / "told" / "mask.safetensors").read_bytes() == mask


def test_ctrl_c_before_training_begins_ends_in_one_line(lab, monkeypatch, capsys, caplog):
    monkeypatch.setattr(Preemption, "on_train_start", lambda *_: signal.default_int_handler(CTRL_C, None))
    assert run("fit", *lab.quick()) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert "KeyboardInterrupt" not in caplog.text
