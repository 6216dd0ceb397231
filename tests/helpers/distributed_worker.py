"""What every rank of tests/learning/test_distributed.py runs: python tests/helpers/distributed_worker.py WORK RANKS.

As torchrun does, but ranks are forks of a process that has imported everything.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import redirect_stdout
from copy import copy
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

from helpers.lab import QUICK_TRAINER, Lab, run
from roi_lightning.contrib.maskpro import MaskProModule
from roi_lightning.contrib.proxsparse import ProxSparseModule
from roi_lightning.contrib.recover import RecoveryModule
from roi_lightning.errors import UserError
from roi_lightning.learning.callbacks import (
    BaselineSummary,
    HardenMasks,
    MaskMonitor,
    SparseExport,
)
from roi_lightning.learning.callbacks.interruption import PreemptedError
from roi_lightning.learning.checkpoint_io import write_sharded
from roi_lightning.learning.fsdp import FSDP2Strategy
from roi_lightning.learning.logits import one_shot_priors
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.oneshot import Wanda
from roi_lightning.reports.callback import Report
from roi_lightning.samplers import Categorical
from roi_lightning.samplers.schedules import Exponential
from roi_lightning.utils.dtensor import local_tensor
from roi_lightning.utils.third_party import silence_warnings


def adamw(rate):
    return partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


STRATEGIES = {
    "ddp": partial(DDPStrategy, gradient_as_bucket_view=True),
    "sharded": FSDP2Strategy,
}
# Of weights the rate has to be lower than of logits.
LEARNERS = {
    "roi": partial(RoILightningModule, prior="magnitude", optimizer=adamw(0.02)),
    # Ranks that share a model share a draw, too. They average the weights' gradients and not the logits', and cold
    # temperatures would magnify how that rounds.
    "step": partial(
        RoILightningModule,
        prior="magnitude",
        draw_per="step",
        lam=Exponential(1.0, 0.1),
        tau=Exponential(1.0, 0.5),
        optimizer=adamw(0.02),
    ),
    "maskllm": partial(
        RoILightningModule,
        draw_per="step",
        sampler=Categorical(),
        prior="activation",
        prior_windows=2,
        lam=Exponential(1.0, 0.1),
        tau=Exponential(1.0, 0.5),
        distillation=0.5,
        kept_norm=1e-3,
        optimizer=adamw(0.02),
    ),
    "measured": partial(
        RoILightningModule, prior="activation", prior_strength=0.5, prior_windows=2, optimizer=adamw(0.02)
    ),
    "1:2": partial(
        RoILightningModule, pattern="1:2", draw_per="step", sampler=Categorical(), optimizer=adamw(0.02)
    ),
    "proxsparse": partial(ProxSparseModule, strength=0.01, optimizer=adamw(1e-3)),
    "maskpro": partial(
        MaskProModule,
        prior="magnitude",
        renew_every=4,
        optimizer=partial(torch.optim.SGD, lr=5.0),
        lr_end=1.0,
    ),
    "joint": partial(
        RoILightningModule, prior="magnitude", distillation=0.5, lr_weights=1e-3, optimizer=adamw(0.02)
    ),
    "joint-step": partial(
        RoILightningModule,
        prior="magnitude",
        draw_per="step",
        distillation=0.5,
        lr_weights=1e-3,
        optimizer=adamw(0.02),
    ),
    "recover": partial(RecoveryModule, distillation=0.5, optimizer=adamw(1e-3)),
}
STEPS, SAVED, TOLD = 6, 3, 4
# Runs that end with a report: one process and two ranks, whole and sharded, with a prior and without.
REPORTED = {f"one-{kind}" for kind in ("llama", "mixtral-step", "proxsparse")}
REPORTED |= {"ddp-llama", "sharded-mixtral-step", "sharded-proxsparse"}
BROKEN = "model.layers.1.mlp.up_proj"


class Apart(Wanda):
    """Norms that differ from rank to rank, by far more than rounding; how many layers this rank has pruned."""

    pruned = 0

    def prune(self, weight, inputs, pattern, name):
        Apart.pruned += 1
        generator, inputs = torch.Generator().manual_seed(int(os.environ["RANK"])), copy(inputs)
        inputs.total = inputs.total * torch.rand(inputs.total.shape, generator=generator)
        return super().prune(weight, inputs, pattern, name)


class Recorder(Callback):
    """The losses of this rank, as one process would count them, what it holds, and after which steps it validated."""

    def __init__(self):
        self.losses, self.held, self.validated = {}, {}, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        index = batch_idx * trainer.world_size + trainer.global_rank
        self.losses[index] = float(outputs["loss"].detach()) * trainer.accumulate_grad_batches

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.global_step)

    def on_train_end(self, trainer, pl_module):
        for name, p in pl_module.named_parameters():
            if isinstance(p, DTensor):
                self.held[name] = [str(p.placements), list(p.shape), list(p.to_local().shape)]


class Break(Callback):
    """On the second rank alone, makes logits NaN before the third step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                local_tensor(pl_module.tensors[BROKEN].learned["logits"])[0] = float("nan")


class Tell(Callback):
    """Sends Ctrl-C to the second rank alone, between two checkpoints."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == TOLD - 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGINT)


def learn(
    model,
    folder,
    shared,
    ckpt_path=None,
    learner="roi",
    windows=4,
    more=(),
    resume=None,
    **trainer,
):
    """Six steps from a prior, of two micro-batches of two windows, at a learning rate that moves the mask."""
    lab, recorder = Lab(folder, shared), Recorder()
    module = LEARNERS[learner](str(model))
    callbacks = [HardenMasks(), SparseExport(), recorder, *more]
    settings = {"log_every_n_steps": 1}
    if learner not in ("roi", "step", "measured"):
        callbacks += [MaskMonitor(every_n_steps=2), BaselineSummary(windows=2)]
        settings |= {"logger": CSVLogger(folder, name="log", version="")}
    if folder.name in REPORTED:
        callbacks.append(Report())
    keep = 1 if resume else -1
    saved = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=SAVED, save_top_k=keep)
    settings |= {
        "validate_every_steps": 2,
        "limit_val_batches": 1,
        "default_root_dir": str(folder),
        "callbacks": [*callbacks, saved],
    }
    settings |= {"enable_checkpointing": True, "max_steps": STEPS, "gradient_clip_val": 1.0} | trainer
    fitter = RoITrainer(**QUICK_TRAINER | settings)
    fitter.fit(module, datamodule=lab.data(windows_per_step=windows), ckpt_path=ckpt_path, resume=resume)
    return module, recorder, fitter


def learned_of(module):
    """What was learned, whole, by parameter."""
    return {
        f"{name}.{kind}": tensor.whole(kind)
        for name, tensor in module.tensors.items()
        for kind in tensor.learned
    }


def main(file):
    torch.set_num_threads(1)
    silence_warnings()
    warnings.filterwarnings("ignore", message="the first draws keep")
    root, work = Path(file).parent, json.loads(Path(file).read_text())
    shared, llama = root / "shared", root / "llama"
    for spec in work["specs"]:
        one_shot_priors()["activation"] = (Apart() if spec["learner"] == "measured" else Wanda(), "dense")
        folder = Path(spec["folder"])
        strategy = STRATEGIES[spec["strategy"]]()
        module, recorder, fitter = learn(
            spec["model"],
            folder,
            shared,
            spec["ckpt_path"],
            spec["learner"],
            spec["windows"],
            strategy=strategy,
            devices=int(os.environ["WORLD_SIZE"]),
        )
        learned = learned_of(module)
        found = {"losses": recorder.losses, "held": recorder.held, "validated": recorder.validated}
        found["measured"], Apart.pruned = Apart.pruned / len(module.tensors), 0
        (folder / f"rank{fitter.global_rank}.json").write_text(json.dumps(found))
        if spec["learner"] == "measured":
            priors = {name: mask.packed for name, mask in module.prior_masks.items()}
            torch.save({"logits": learned, "priors": priors}, folder / f"rank{fitter.global_rank}.pt")
        if fitter.is_global_zero:
            torch.save(learned, folder / "learned.pt")
        fitter.strategy.barrier()
    one_shot_priors()["activation"] = (Wanda(), "dense")
    if not work.get("all"):
        return
    for strategy in ("ddp", "sharded"):
        fail(llama, root / f"{strategy}-broken", shared, strategy=STRATEGIES[strategy](), more=[Break()])
    end_and_go_on(llama, root / "told", shared)
    type_commands(root / "typed", shared, llama, root / "one-llama" / "export")
    write_apart(root / "apart")


def fail(model, folder, shared, **options):
    """What each rank says of a run that is broken on one of them."""
    folder.mkdir(exist_ok=True)
    try:
        learn(model, folder, shared, devices=2, **options)
    except UserError as error:
        (folder / f"rank{os.environ['RANK']}.txt").write_text(str(error))


def end_and_go_on(model, folder, shared):
    """A run that one rank is told to end, and the same command again."""
    options = {"learner": "maskllm", "resume": "auto", "devices": 2}
    folder.mkdir(exist_ok=True)
    try:
        learn(model, folder, shared, strategy=FSDP2Strategy(), more=[Tell()], **options)
    except PreemptedError as end:
        kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
        (folder / f"ended{os.environ['RANK']}.json").write_text(json.dumps([end.code, *kept]))
    dist.barrier()  # processes of their own would end here
    module, recorder, fitter = learn(model, folder, shared, strategy=FSDP2Strategy(), **options)
    learned = learned_of(module)
    if fitter.is_global_zero:
        torch.save(learned, folder / "learned.pt")
        (folder / "losses.json").write_text(json.dumps(recorder.losses))


def type_commands(folder, shared, model, prior):
    """`fit` and `validate` as they are typed after torchrun, with the overlay that is shipped."""
    lab = Lab(folder, shared)
    Report.finish = lambda *_: None  # as in helpers.lab.make_lab
    spread = ["--config", "overlays/fsdp2.yaml", "--trainer.devices", "2", "--model.prior", str(prior)]
    spread += ["--trainer.default_root_dir", str(folder)]
    assert run("fit", *lab.quick(*spread, model=model)) == 0
    with (folder / f"validate{os.environ['RANK']}.txt").open("w") as said, redirect_stdout(said):
        saved = str(folder / "checkpoints" / "step=4.ckpt")
        assert run("validate", *lab.quick(*spread, "--ckpt_path", saved, model=model)) == 0


def write_apart(folder):
    """A checkpoint of ranks that see different disks."""
    own = folder / os.environ["RANK"]
    own.mkdir(parents=True)
    os.chdir(own)
    try:
        write_sharded({"state_dict": {"a": torch.ones(2)}, "optimizer_states": []}, Path("a.ckpt"))
    except UserError as error:
        (folder / f"rank{own.name}.txt").write_text(str(error))


if __name__ == "__main__":
    ranks = int(sys.argv[2])
    one_machine = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    elastic_launch(LaunchConfig(nproc_per_node=ranks, start_method="fork", **one_machine), main)(sys.argv[1])
