"""Runs that are told to end lose no step, and go on by themselves to the same bits."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.lab import GOING_ON, make_lab, new_lab
from roi_lightning.learning.callbacks import HardenMasks

lab = pytest.fixture(make_lab)
STEPS = 5
pytestmark = GOING_ON


class TellAt(Callback):
    """Sends SIGTERM to this process at one call of one hook."""

    def __init__(self, hook, call):
        self.left = call
        setattr(self, hook, self._count)

    def _count(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


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
    ("hook", "call", "saved"),
    [
        ("on_train_batch_start", 2, 1),
        pytest.param("on_before_optimizer_step", 2, 2, marks=pytest.mark.slow),
        ("on_train_batch_end", 5, 3),
        ("on_validation_end", 1, 3),
        ("on_save_checkpoint", 1, 2),
        pytest.param("on_train_batch_end", 2 * STEPS, 5, marks=pytest.mark.slow),
        ("on_train_end", 1, 5),
    ],
)
def test_no_step_is_lost(lab, whole, hook, call, saved):
    before, mask = whole
    seen, rest = Steps(), Steps()
    with pytest.raises(SystemExit) as ended:
        learn(lab, "told", seen, TellAt(hook, call))
    assert ended.value.code == 128 + 15
    folder = lab.folder / "told" / "checkpoints"
    kept = [torch.load(file, weights_only=True)["global_step"] for file in folder.glob("[!.]*.ckpt")]
    assert max(kept, default=0) == saved
    learn(lab, "told", rest)
    assert rest.steps[:1] == ([saved] if saved < STEPS else [])
    assert seen.micro_batches[: 2 * saved] + rest.micro_batches == before.micro_batches
    assert seen.validations | rest.validations == before.validations
    assert (lab.folder / "told" / "mask.safetensors").read_bytes() == mask
