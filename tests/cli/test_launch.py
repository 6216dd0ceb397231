"""Runs as docs/training.md types them: by Lightning's own launcher, and by torchrun on two machines."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from cli_helpers import make_lab, run
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


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


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


def torchruns(lab, folder, steps):
    """What is typed on each of two machines."""
    there = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    there += ["--local_addr", "127.0.0.1"]
    options = ["--config", "overlays/fsdp2.yaml", "--trainer.num_nodes", "2", "--trainer.devices", "1"]
    options += ["--resume", "auto", *FAST, *places(folder)]
    command = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *there]
    command += [*FIT, *lab.quick(*options, max_steps=steps)]
    return [start(command, lab.folder / f"machine{number}.log") for number in (0, 1)]


def test_two_machines_are_ended_and_resume(lab):
    folder, steps = lab.folder / "two", 40
    tasks = torchruns(lab, folder, steps)
    try:
        until = time.monotonic() + 120
        while not list(folder.glob("checkpoints/step=20.ckpt")):  # quickstart.yaml's first
            assert time.monotonic() < until
            assert all(task.poll() is None for task in tasks)
            time.sleep(0.02)
        for task in tasks:
            task.send_signal(signal.SIGTERM)
        assert all(task.wait(60) for task in tasks)
    finally:
        for task in tasks:
            task.kill()
    (saved,) = (path for path in folder.glob("checkpoints/*.ckpt") if not path.is_symlink())
    assert 20 <= int(saved.stem.rpartition("=")[2]) < steps
    assert [task.wait(120) for task in torchruns(lab, folder, steps)] == [0, 0]
    assert f"resuming from {saved}" in (lab.folder / "machine0.log").read_text()
    assert_learned_as_one_process_does(lab, folder, steps)
