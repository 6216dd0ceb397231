"""Stop on a loss or gradient that is infinite or NaN, before the optimizer step."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn

from roi_lightning.errors import UserError
from roi_lightning.learning.resume import last_written
from roi_lightning.utils.dtensor import all_finite, full_tensor


def check_step(
    trainer: Trainer, finite_losses: Tensor | bool, parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Refuse an optimizer step whose losses or gradients are not finite; synchronises with the device once.

    Under `16-mixed` the scaler skips such a step by itself and halves its scale. Only where the scale has fallen
    below 1 it can't be what the gradients overflow from.

    Args:
        trainer: About to step.
        finite_losses: Whether the losses of all micro-batches of the step were finite.
        parameters: With their gradients, by name.

    Raises:
        UserError: Naming the step, the loss or the first such gradient's parameter, and the checkpoint to go back to.
    """
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    norm = full_tensor(nn.utils.get_total_norm(gradients.values()))
    # One rank's loss is every rank's: they stop together, or the others would wait forever.
    agree = trainer.strategy.reduce_boolean_decision
    if agree(bool(norm.isfinite() & finite_losses), all=True) or _left_to_scaler(trainer.precision_plugin):
        return
    broken = (f"the gradient of {name}" for name, gradient in gradients.items() if not all_finite(gradient))
    what = next(broken, None) if agree(bool(finite_losses), all=True) else "the loss"
    if what is None:  # only the squares are too large
        return
    raise UserError(
        f"{what} is not finite at optimizer step {trainer.global_step}; {_recovery_hint(trainer)} with a lower "
        "learning rate, or start cooler where the method anneals (model.lam, model.tau); "
        "--trainer.detect_anomaly true names the operation"
    )


def _left_to_scaler(precision: Any) -> bool:
    scaler = getattr(precision, "scaler", None)
    return scaler is not None and scaler.get_scale() >= 1


def _recovery_hint(trainer: Trainer) -> str:
    checkpoint = last_written(trainer)
    if checkpoint is None:
        return "start again"
    return f"resume from the last good checkpoint (--ckpt_path {checkpoint!r})"
