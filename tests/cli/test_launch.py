"""Runs as docs/training.md types them: by Lightning's own launcher, and by torchrun on two machines."""

import os
import subprocess
import sys

import pytest

from helpers.lab import make_lab, run
from roi_lightning.export import verify_export
from roi_lightning.masks.mask_set import MaskSet

lab = pytest.fixture(make_lab)
pytestmark = pytest.mark.slow
FIT = ["-m", "roi_lightning", "fit"]
FAST = ["--model.optimizer.init_args.lr", "0.02", "--model.lr_end", "0.02"]


def start(arguments, log):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=file, stderr=file)


def places(folder):
    return ["--trainer.default_root_dir", str(folder)]


def assert_learned_as_one_process_does(lab, folder, steps):
    alone = lab.folder / "alone"
    assert run("fit", *lab.quick(*FAST, *places(alone), max_steps=steps, accumulate=2)) == 0
    one, two = (MaskSet.load(path / "mask.safetensors").layers for path in (alone, folder))
    kept = sum(mask.kept for mask in one.values())
    assert sum(mask.kept_with(two[name]) for name, mask in one.items()) > 0.98 * kept
    assert verify_export(folder / "export").ok


@pytest.mark.parametrize("overlay", ["ddp", "fsdp2"])
def test_one_command_starts_a_process_for_every_device(lab, overlay):
    folder, log = lab.folder / "two", lab.folder / "log"
    options = ["--config", f"overlays/{overlay}.yaml", "--trainer.devices", "2", *FAST, *places(folder)]
    task = start([*FIT, *lab.quick(*options)], log)
    assert task.wait(120) == 0, log.read_text()
    assert_learned_as_one_process_does(lab, folder, 4)
