"""The learning rate of a run, and what a resumed run takes from its configuration."""

import math
from collections.abc import Callable

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_to(optimizer: Optimizer, end: float, steps: int) -> LambdaLR:
    """Half a cosine from the optimizer's own learning rate to `end`.

    Args:
        optimizer: Its groups' rates are the rates at step 0.
        end: Learning rate at the last step.
        steps: Optimizer steps of the run.

    Returns:
        A function of the step alone, so that a resumed run goes on with the very same rates.
    """
    return LambdaLR(optimizer, [_cosine(end / group["lr"], steps) for group in optimizer.param_groups])


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


def _cosine(end: float, total: int) -> Callable[[int], float]:
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * min(1.0, step / total))) / 2
