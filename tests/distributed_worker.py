"""What every rank of tests/test_distributed.py runs: torchrun tests/distributed_worker.py SPEC."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.tensor import DTensor

from cli_helpers import QUICK_TRAINER, Lab
from roi_lightning import module
from roi_lightning.callbacks import HardenMasks, SparseExport
from roi_lightning.errors import UserError
from roi_lightning.module import RoILightningModule
from roi_lightning.sharded_strategy import ShardedStrategy
from roi_lightning.shards import part, whole
from roi_lightning.trainer import RoITrainer

STRATEGIES = {
    "ddp": partial(DDPStrategy, gradient_as_bucket_view=True),
    "sharded": ShardedStrategy,
    "gathered": partial(ShardedStrategy, save_distributed_checkpoint=False),
}
STEPS, SAVED = 6, 3
BROKEN = "model.layers.1.mlp.up_proj"


class Norms:
    """Measured norms that differ from rank to rank, by far more than rounding; how often this rank was asked."""

    asked = 0
    measured = staticmethod(module.input_norms)

    @classmethod
    def of(cls, *args):
        cls.asked += 1
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        norms = cls.measured(*args)
        return {name: norm * torch.rand(norm.shape, generator=generator) for name, norm in norms.items()}


class Recorder(Callback):
    """The loss of every draw of this rank, what the rank holds, and the steps after which it validated."""

    def __init__(self):
        self.losses, self.held, self.validated = {}, {}, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[pl_module.state.draw.index] = (
            float(outputs["loss"].detach()) * trainer.accumulate_grad_batches
        )

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
                part(pl_module.layers[BROKEN].logits)[0] = float("nan")


def learn(model, folder, shared, ckpt_path=None, more=(), prior="magnitude", strength=0.015, **trainer):
    """Six steps of two micro-batches from a prior, at a learning rate that moves the mask."""
    lab, recorder = Lab(folder, shared), Recorder()
    learner = RoILightningModule(
        str(model),
        prior=prior,
        prior_strength=strength,
        optimizer=partial(torch.optim.AdamW, lr=0.02, betas=(0.9, 0.95), weight_decay=0.0),
    )
    callbacks = [HardenMasks(), SparseExport(), recorder, *more]
    callbacks.append(
        ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    )
    settings = {
        "validate_every_steps": 2,
        "limit_val_batches": 1,
        "default_root_dir": str(folder),
        "callbacks": callbacks,
    }
    settings |= {"enable_checkpointing": True, "max_steps": STEPS, "gradient_clip_val": 1.0} | trainer
    fitter = RoITrainer(**QUICK_TRAINER | settings)
    fitter.fit(learner, datamodule=lab.data(windows_per_step=4), ckpt_path=ckpt_path)
    return learner, recorder, fitter


def main():
    torch.set_num_threads(1)
    module.input_norms = Norms.of
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(spec["folder"])
        strategy = STRATEGIES[spec["strategy"]]()
        learner, recorder, fitter = learn(
            spec["model"],
            folder,
            Path(spec["shared"]),
            spec.get("ckpt_path"),
            **spec.get("options", {}),
            strategy=strategy,
            devices=2,
        )
        logits = {name: whole(layer.logits.detach()) for name, layer in learner.layers.items()}
        found = {"losses": recorder.losses, "held": recorder.held, "validated": recorder.validated}
        found["measured"] = Norms.asked
        Norms.asked = 0
        (folder / f"rank{fitter.global_rank}.json").write_text(json.dumps(found))
        priors = {name: mask.packed for name, mask in learner.prior_masks.items()}
        torch.save({"logits": logits, "priors": priors}, folder / f"rank{fitter.global_rank}.pt")
        fitter.strategy.barrier()
    for strategy in ("ddp", "sharded"):
        fail(strategy, spec["model"], folder.parent / f"{strategy}-broken", Path(spec["shared"]))


def fail(strategy, model, folder, shared):
    """What each rank says of a run that is broken on one of them."""
    folder.mkdir(exist_ok=True)
    try:
        learn(model, folder, shared, strategy=STRATEGIES[strategy](), devices=2, more=[Break()])
    except UserError as error:
        (folder / f"rank{os.environ['RANK']}.txt").write_text(str(error))


if __name__ == "__main__":
    main()
