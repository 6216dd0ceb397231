"""The learning rate of a run, and what a resumed run takes from its configuration."""

import math
from collections.abc import Callable
from typing import Literal

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Decay = Literal["cosine", "linear"]


def decay_to(
    optimizer: Optimizer, end: float, steps: int, shape: Decay = "cosine", warmup: float = 0.0
) -> LambdaLR:
    """From the optimizer's own learning rate to `end`, after a straight line up to it from 0 if asked for.

    Args:
        optimizer: Its groups' rates are those from which the decay starts.
        end: Learning rate at the end of the run.
        steps: Optimizer steps of the run.
        shape: Of the decay: half a cosine or a straight line.
        warmup: Share of the run that the line up takes, rounded up to whole steps.

    Returns:
        A function of the step alone, so that a resumed run goes on with the very same rates.
    """
    rising = math.ceil(warmup * steps)
    return LambdaLR(
        optimizer, [_factor(end / group["lr"], steps, shape, rising) for group in optimizer.param_groups]
    )


def keep_configured(trainer: Trainer, optimizer: Optimizer, schedule: LambdaLR) -> None:
    """Undo what Lightning restores from a checkpoint besides the optimizer's state.

    Args:
        trainer: About to train on.
        optimizer: Made afresh from the configuration; its settings are copied to the trainer's.
        schedule: Likewise.
    """
    restored = trainer.lr_scheduler_configs[0].scheduler
    assert isinstance(restored, LambdaLR)
    restored.base_lrs = schedule.base_lrs
    rates = [
        base * at(restored.last_epoch)
        for base, at in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    groups = zip(trainer.optimizers[0].param_groups, optimizer.param_groups, rates, strict=True)
    for group, settings, rate in groups:
        group.update({key: value for key, value in settings.items() if key != "params"} | {"lr": rate})


def _factor(end: float, total: int, shape: Decay, rising: int) -> Callable[[int], float]:
    def at(step: int) -> float:
        if step < rising:
            return step / rising
        done = min(1.0, (step - rising) / max(1, total - rising))
        left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
        return end + (1 - end) * left

    return at
