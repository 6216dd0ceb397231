"""Two machines under Slurm, as far as its environment goes: ended together, and going on together."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from cli_helpers import make_lab
from roi_lightning.callbacks.preemption import STATUS
from roi_lightning.export import verify_export

lab = pytest.fixture(make_lab)


def srun(lab, steps, job, overlay):
    """The task of each of two nodes, with what srun tells it."""
    command = [sys.executable, "-m", "roi_lightning", "fit", *lab.quick(max_steps=steps)]
    command += ["--config", f"overlays/{overlay}.yaml", "--trainer.num_nodes", "2", "--trainer.devices", "1"]
    command += ["--resume", "auto", "--model.prior", "magnitude"]
    tasks = []
    for node in (0, 1):
        told = {"JOB_ID": job, "JOB_NAME": "learn", "NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2}
        told |= {"NODELIST": "127.0.0.1", "PROCID": node, "LOCALID": 0, "NODEID": node}
        environment = os.environ | {f"SLURM_{name}": str(value) for name, value in told.items()}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with (lab.folder / f"node{node}.log").open("ab") as log:
            tasks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return tasks


def wait_for(tasks, found):
    while not (paths := found()):
        assert all(task.poll() is None for task in tasks), "a task ended by itself"
        time.sleep(0.05)
    return paths


@pytest.mark.parametrize("overlay", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_nodes_end_together_and_go_on_together(lab, overlay):
    job = random.randrange(10_000, 50_000)
    saved = lab.folder / "runs" / "quickstart" / "checkpoints"
    tasks = srun(lab, 100_000, job, overlay)
    try:
        wait_for(tasks, lambda: sorted(saved.glob("*.ckpt")))
        for task in tasks:
            task.send_signal(signal.SIGTERM)
        assert [task.wait(60) for task in tasks] == [STATUS, STATUS]
    finally:
        for task in tasks:
            task.kill()
    (path,) = (path for path in saved.glob("*.ckpt") if not path.is_symlink())
    step = int(path.stem.rpartition("=")[2])
    assert f"step {step} is saved" in (lab.folder / "node0.log").read_text()
    assert [task.wait(120) for task in srun(lab, step + 2, job + 1, overlay)] == [0, 0]
    assert f"going on from {path}" in (lab.folder / "node0.log").read_text()
    assert verify_export(lab.folder / "runs" / "quickstart" / "export").ok
