"""Two machines under Slurm, as far as its environment goes: ended together, and resuming together."""

import os
import signal
import socket
import subprocess
import sys
import time
from itertools import count

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from helpers.lab import make_lab
from roi_lightning.cli.lightning import build
from roi_lightning.errors import UserError
from roi_lightning.export import verify_export

lab = pytest.fixture(make_lab)


def spread(overlay):
    return ["--config", f"overlays/{overlay}.yaml", "--trainer.num_nodes", "2", "--trainer.devices", "1"]


def told(job, node):
    """What srun tells the task of one of two nodes."""
    variables = {"JOB_ID": job, "JOB_NAME": "learn", "NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2}
    variables |= {"NODELIST": "127.0.0.1", "PROCID": node, "LOCALID": 0, "NODEID": node}
    return {f"SLURM_{name}": str(value) for name, value in variables.items()}


@pytest.mark.parametrize("node", [0, 1])
def test_every_task_knows_its_place(lab, node, monkeypatch):
    for name, value in told(12345, node).items():
        monkeypatch.setenv(name, value)
    trainer = build(lab.quick(*spread("ddp"))).trainer
    assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    assert (trainer.world_size, trainer.global_rank) == (2, node)


def test_tasks_that_do_not_say_where_they_run_are_refused(lab, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(UserError, match=r"You set `--ntasks=2`.*give another value"):
        build(lab.quick())


def free_job(after):
    """A job's number above another. Lightning makes a port of its last four digits, which has to be free."""
    return next(job for job in count(after + 1) if is_free(15_000 + job % 10_000))


def is_free(port):
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def srun(lab, job, overlay):
    """The task of each of two nodes."""
    command = [sys.executable, "-m", "roi_lightning", "fit", *lab.quick(*spread(overlay), max_steps=300)]
    command += ["--resume", "auto", "--model.prior", "magnitude"]
    tasks = []
    for node in (0, 1):
        environment = os.environ | told(job, node) | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with (lab.folder / f"node{node}.log").open("ab") as log:
            tasks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return tasks


def wait_for(tasks, found, seconds=120):
    end = time.monotonic() + seconds
    while not (paths := found()):
        assert all(task.poll() is None for task in tasks), "a task ended by itself"
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["ddp", "fsdp2"])
def test_two_nodes_end_together_and_resume_together(lab, overlay):
    job, folder = free_job(10_000), lab.folder / "runs" / f"quickstart+{overlay}"
    saved = folder / "checkpoints"
    tasks = srun(lab, job, overlay)
    try:
        wait_for(tasks, lambda: sorted(saved.glob("*.ckpt")))
        for task in tasks:
            task.send_signal(signal.SIGTERM)
        assert [task.wait(60) for task in tasks] == [143, 143]
    finally:
        for task in tasks:
            task.kill()
    (path,) = (path for path in saved.glob("*.ckpt") if not path.is_symlink())
    step = int(path.stem.rpartition("=")[2])
    assert f"step {step} is saved" in (lab.folder / "node0.log").read_text()
    assert [task.wait(120) for task in srun(lab, free_job(job), overlay)] == [0, 0]
    assert f"resuming from {path}" in (lab.folder / "node0.log").read_text()
    assert verify_export(folder / "export").ok
