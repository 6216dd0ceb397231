"""What a run notes for a study, a JSON line at a time, so that a run that is killed has noted it too."""

import json
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class RunRecord(Callback):
    """Appends the time after every optimizer step, and every held-out perplexity.

    Lightning's own CSVLogger has no times, starts its file anew when a run resumes, and counts steps from 0 or
    from 1 depending on where it resumed.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._step = trainer.global_step
        self._note(pl_module, step=trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._note(pl_module, step=trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        perplexity = float(trainer.callback_metrics["val/perplexity"])
        self._note(pl_module, validated=trainer.global_step, perplexity=perplexity)

    def _note(self, learner: LightningModule, **values: float) -> None:
        if learner.device.type == "cuda":
            torch.cuda.synchronize(learner.device)
        with self.path.open("a") as file:
            file.write(json.dumps({**values, "time": time.monotonic()}) + "\n")
