"""Optimizer, learning rate and trainer settings of a run: checked before text or weights are read, then applied."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.learning.resume import last_written
from roi_lightning.utils.dtensor import all_finite, full_tensor

_LOW_PRECISIONS: Final = ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16")

Decay = Literal["cosine", "linear"]


def decay_to(
    optimizer: Optimizer, end: float, steps: int, shape: Decay = "cosine", warmup: float = 0.0
) -> LambdaLR:
    """From the optimizer's own learning rate to `end`, after a straight line up to it from 0 if asked for.

    Args:
        optimizer: Its groups' rates are those from which the decay starts.
        end: The first group's learning rate at the end of the run; all fall to the same fraction.
        steps: Optimizer steps of the run.
        shape: Of the decay: half a cosine or a straight line.
        warmup: Share of the run that the line up takes, rounded up to whole steps.

    Returns:
        A function of the step alone, so that a resumed run continues with the very same rates.
    """
    rising = math.ceil(warmup * steps)
    return LambdaLR(optimizer, _factor(end / optimizer.param_groups[0]["lr"], steps, shape, rising))


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


def check_trainer(settings: Any) -> None:
    """Refuse settings under which a mask can't be learned.

    Args:
        settings: A Trainer, or the section `trainer` of a configuration.

    Raises:
        UserError: Naming the setting and the remedy.
    """
    # A section that a file sets to null has lost what it does not name again.
    precision, steps = getattr(settings, "precision", None), getattr(settings, "max_steps", None)
    if precision in _LOW_PRECISIONS:
        raise UserError(
            f"trainer.precision {precision!r} would round the logits, which move by less than it can hold; "
            "use 32-true and choose the frozen weights' type with model.dtype"
        )
    if (steps or 0) < 1:
        raise UserError(
            f"trainer.max_steps is {steps}; set it to the number of optimizer steps (--steps), or give a "
            "configuration (--config quickstart.yaml)"
        )
    check_at_least(
        settings, "trainer.", accumulate_grad_batches=1, validate_every_steps=1, gradient_clip_val=0
    )


def count_micro_batches(settings: Any, given: Any, data: CalibrationDataModule | None, ranks: int) -> None:
    """Set Lightning's counts of micro-batches by the windows and optimizer steps that a run was asked for.

    Args:
        settings: A Trainer, or the section `trainer` of a configuration; what Lightning was given itself stays.
        given: Its `accumulate_grad_batches`, `val_check_interval` and `validate_every_steps` as they were given; None
            is left out.
        data: Where the windows come from, if that counts them.
        ranks: Processes that learn together.

    Raises:
        UserError: For windows that can't be divided, or a validation that the run never reaches.
    """
    parts = given.accumulate_grad_batches
    if parts is None:
        parts = settings.accumulate_grad_batches = 1 if data is None else data.micro_batches(ranks)
    if given.validate_every_steps is not None and given.val_check_interval is None:
        settings.val_check_interval = given.validate_every_steps * parts
        # Or Lightning would count within an epoch, and refuse an interval longer than that.
        settings.check_val_every_n_epoch = None
    every, batches = settings.val_check_interval, settings.max_steps * parts
    counts_within_epoch = settings.check_val_every_n_epoch is not None and settings.limit_val_batches != 0
    if type(every) is int and every > batches and counts_within_epoch:
        raise UserError(
            f"trainer.val_check_interval is {every}, and the run has {batches} micro-batches; lower it, or set "
            "trainer.check_val_every_n_epoch to null to validate only if the run gets that far"
        )


def check_optimizer(make: OptimizerCallable, sharded: bool = False) -> None:
    """Refuse an optimizer that can't be made, has no learning rate, or whose states can't be sharded.

    Args:
        make: Makes the optimizer of a list of parameters.
        sharded: Whether its states are to be.

    Raises:
        UserError: Naming the value, or the optimizer and the remedy.
    """
    try:
        optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model.optimizer can't be made: {error}; give another value") from error
    for group in optimizer.param_groups:
        if not 0 < group["lr"] < math.inf:
            raise UserError(f"model.optimizer has lr {group['lr']}; it must be a positive number")
    if sharded and type(optimizer).__module__.startswith("torchao"):
        raise UserError(
            f"{type(optimizer).__name__} keeps states in 8 bits, which can't be written as shards; leave "
            "overlays/adamw8bit.yaml out: AdamW's states are small once they are sharded"
        )


def check_finite_step(
    trainer: Trainer, finite_losses: Tensor | bool, parameters: Iterable[tuple[str, nn.Parameter]]
) -> Tensor | bool:
    """Refuse an optimizer step with a loss or gradient that is NaN or infinite.

    A GPU is asked where Lightning logs, and else not waited for. Under `16-mixed` the scaler skips such a step by
    itself and halves its scale. Only where the scale has fallen below 1 it can't be what the gradients overflow from.

    Args:
        trainer: About to step.
        finite_losses: Whether all losses since the last time that this was asked were finite.
        parameters: With their gradients, by name.

    Returns:
        Whether all was finite that has not been asked for yet, on the device.

    Raises:
        UserError: Naming the step, the loss or the first such gradient's parameter, and the checkpoint to go back to.
    """
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    norm = full_tensor(nn.utils.get_total_norm(gradients.values()))
    finite = norm.isfinite() & finite_losses
    if _is_put_off(trainer, norm):
        return finite
    # One rank's loss is every rank's: they stop together, or the others would wait forever.
    agree = trainer.strategy.reduce_boolean_decision
    if agree(bool(finite), all=True) or _left_to_scaler(trainer.precision_plugin):
        return True
    broken = (f"the gradient of {name}" for name, gradient in gradients.items() if not all_finite(gradient))
    what = next(broken, None) if agree(bool(finite_losses), all=True) else "the loss"
    if what is None:  # only the squares are too large
        return True
    raise UserError(
        f"{what} is not finite at optimizer step {trainer.global_step}; {_recovery_hint(trainer)} with a lower "
        "learning rate, or start cooler where the method anneals (model.lam, model.tau); "
        "--trainer.detect_anomaly true names the operation"
    )


def _is_put_off(trainer: Trainer, norm: Tensor) -> bool:
    if not norm.is_cuda or getattr(trainer.precision_plugin, "scaler", None) is not None:
        return False
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return not every or (trainer.global_step + 1) % every != 0


def check_finite_so_far(trainer: Trainer, finite: Tensor | bool) -> None:
    """Refuse to go on after steps that `check_finite_step` has put off asking about.

    Raises:
        UserError: If a loss or gradient was not finite.
    """
    if not trainer.strategy.reduce_boolean_decision(bool(finite), all=True):
        raise UserError(
            f"a loss or gradient was not finite before optimizer step {trainer.global_step}; "
            f"{_recovery_hint(trainer)} with a lower learning rate"
        )


def _left_to_scaler(precision: Any) -> bool:
    scaler = getattr(precision, "scaler", None)
    return scaler is not None and scaler.get_scale() >= 1


def _recovery_hint(trainer: Trainer) -> str:
    checkpoint = last_written(trainer)
    if checkpoint is None:
        return "start again"
    return f"resume from the last good checkpoint (--ckpt_path {checkpoint!r})"
