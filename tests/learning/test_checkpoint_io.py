"""Checkpoints on disks that fill up, damaged ones, ones that are no longer needed, and runs killed beside them."""

import os
import resource
import shutil
from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from helpers.lab import GOING_ON, CutAt, PowerCutError, make_lab
from helpers.refusals import flipped
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import HardenMasks
from roi_lightning.learning.checkpoint_io import read_checkpoint, write_checkpoint, write_sharded

lab = pytest.fixture(make_lab)
STEPS = 6
pytestmark = GOING_ON


class Watch(Callback):
    """Which checkpoints lie in the run's folder after each step."""

    def __init__(self, folder):
        self.folder, self.seen = folder, {}

    def on_train_batch_end(self, trainer, *args):
        self.seen[trainer.global_step] = names(self.folder)


def learn(lab, name, *more, keep=-1, resume="auto"):
    """Six steps with a checkpoint after every second one."""
    folder = lab.folder / name
    keeper = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=keep)
    trainer = {"default_root_dir": str(folder), "enable_checkpointing": True}
    lab.learn(STEPS, callbacks=[HardenMasks(), *more, keeper], trainer=trainer, resume=resume)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def mask(lab, name):
    return (lab.folder / name / "mask.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The mask of a run without interruption."""
    with pytest.MonkeyPatch.context() as patch:
        lab = make_lab(tmp_path_factory.mktemp("whole"), tmp_path_factory, patch)
        learn(lab, "whole")
        return mask(lab, "whole")


# Space.


def numbers(count):
    """A checkpoint of about four bytes a number."""
    state = {"state": {0: {"exp_avg": torch.rand(count // 4)}}, "param_groups": []}
    return {
        "state_dict": {"a": torch.rand(count // 2)},
        "optimizer_states": [state],
        "b": torch.rand(count // 4),
    }


@contextmanager
def files_no_longer_than(size):
    """What the system refuses to write as it would on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [write_checkpoint, write_sharded])
def test_a_disk_that_fills_up_while_a_checkpoint_is_written_costs_none(write, tmp_path, one_rank):
    path, first = tmp_path / "a.ckpt", numbers(200_000)
    write(first, path)
    # In the middle of the large tensors, and in what comes after them.
    for size in (100_000, 450_000):
        with files_no_longer_than(size), pytest.raises(UserError, match=r"a\.ckpt"):
            write(numbers(400_000), path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
        kept = read_checkpoint(path)
        assert torch.equal(kept["state_dict"]["a"], first["state_dict"]["a"])
        assert torch.equal(kept["b"], first["b"])


def test_a_run_without_space_for_a_checkpoint_resumes_from_the_one_before(lab, whole, monkeypatch):
    full = shutil.disk_usage(lab.folder)._replace(free=10_000)

    def fill_up(trainer, *args):
        if trainer.global_step == 3:
            monkeypatch.setattr("shutil.disk_usage", lambda folder: full)

    with pytest.raises(UserError):
        learn(lab, "run", LambdaCallback(on_train_batch_end=fill_up), keep=1)
    monkeypatch.undo()
    assert names(lab.folder / "run") == ["step=2.ckpt"]
    learn(lab, "run", keep=1)
    assert mask(lab, "run") == whole


# Damage.


def test_a_damaged_newest_checkpoint_is_passed_over(lab, whole):
    with pytest.raises(PowerCutError):
        learn(lab, "run", CutAt(5))
    assert names(lab.folder / "run") == ["step=2.ckpt", "step=4.ckpt"]
    newest = lab.folder / "run" / "checkpoints" / "step=4.ckpt"
    newest.write_bytes(flipped(0.5)(newest.read_bytes()))
    watch = Watch(lab.folder / "run")
    learn(lab, "run", watch)
    assert list(watch.seen) == [3, 4, 5, 6]
    assert mask(lab, "run") == whole


# Resuming.


def test_only_what_a_run_resumed_from_is_removed_and_only_once_there_is_a_newer_one(lab, whole):
    with pytest.raises(PowerCutError):
        learn(lab, "run", CutAt(3), keep=1)
    folder = lab.folder / "run" / "checkpoints"
    shutil.copy(folder / "step=2.ckpt", folder / "mine.ckpt")
    os.utime(folder / "mine.ckpt", ns=(0, 0))
    watch = Watch(lab.folder / "run")
    learn(lab, "run", watch, keep=1)
    before, between, after = (["mine.ckpt", f"step={step}.ckpt"] for step in (2, 4, 6))
    # The watch looks before a checkpoint is written.
    assert watch.seen == {3: before, 4: before, 5: between, 6: between}
    assert names(lab.folder / "run") == after
    assert mask(lab, "run") == whole


def test_a_checkpoint_given_by_name_is_not_removed(lab):
    with pytest.raises(PowerCutError):
        learn(lab, "run", CutAt(3), keep=1)
    path = lab.folder / "run" / "checkpoints" / "step=2.ckpt"
    keeper = ModelCheckpoint(path.parent, "{step}", every_n_train_steps=2, save_top_k=1)
    trainer = {"enable_checkpointing": True}
    lab.learn(STEPS, callbacks=[keeper], trainer=trainer, ckpt_path=str(path))
    assert names(lab.folder / "run") == ["step=2.ckpt", "step=6.ckpt"]
