"""What a run asks of its trainer and its optimizer, checked before text or weights are read."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from lightning.pytorch.cli import OptimizerCallable

from roi_lightning.errors import UserError

_LOW_PRECISIONS: Final = ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16")


def check_trainer(settings: Any) -> None:
    """Refuse settings under which a mask can't be learned.

    Args:
        settings: A Trainer, or the section `trainer` of a configuration.

    Raises:
        UserError: Naming the setting and the remedy.
    """
    value = partial(_value, settings)
    if value("precision") in _LOW_PRECISIONS:
        raise UserError(
            f"trainer.precision {value('precision')!r} would round the logits, which move by less than it can hold; "
            "use 32-true and choose the frozen weights' type with model.dtype"
        )
    if (value("max_steps") or 0) < 1:
        raise UserError(
            f"trainer.max_steps is {value('max_steps')}; set it to the number of optimizer steps: "
            "annealing ends at a fraction of them"
        )
    if (value("accumulate_grad_batches") or 0) < 1:
        raise UserError(
            f"trainer.accumulate_grad_batches is {value('accumulate_grad_batches')}; set it to the number of "
            "micro-batches of an optimizer step, at least 1"
        )
    clip = value("gradient_clip_val")
    if clip is not None and not 0 <= clip < math.inf:
        raise UserError(f"trainer.gradient_clip_val is {clip}; set it to the largest norm, or leave it out")
    _check_validation(value)


def _value(settings: Any, name: str) -> Any:
    # A section that a file sets to null has lost what it does not name again.
    return getattr(settings, name, None)


def _check_validation(value: Callable[[str], Any]) -> None:
    every, batches = value("val_check_interval"), value("max_steps") * value("accumulate_grad_batches")
    counts_within_epoch = value("check_val_every_n_epoch") is not None and value("limit_val_batches") != 0
    if type(every) is int and every > batches and counts_within_epoch:
        raise UserError(
            f"trainer.val_check_interval is {every}, and the run has {batches} micro-batches; lower it, or set "
            "trainer.check_val_every_n_epoch to null to validate only if the run gets that far"
        )


def check_optimizer(make: OptimizerCallable, lr_end: float) -> None:
    """Refuse an optimizer that can't be made, and learning rates that are no rates.

    Args:
        make: Makes the optimizer of a list of parameters.
        lr_end: The last learning rate.

    Raises:
        UserError: Naming the value.
    """
    if not 0 <= lr_end < math.inf:
        raise UserError(f"model.lr_end is {lr_end}; it must be a learning rate, 0 or above")
    try:
        groups = make([torch.nn.Parameter(torch.zeros(1))]).param_groups
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model.optimizer can't be made: {error}; give another value") from error
    for group in groups:
        if not 0 < group["lr"] < math.inf:
            raise UserError(f"model.optimizer has lr {group['lr']}; it must be a positive number")
