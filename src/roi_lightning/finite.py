"""Losses and gradients that are no numbers any more: noticed before an optimizer spreads them."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn

from roi_lightning.checkpoints import last_written
from roi_lightning.errors import UserError
from roi_lightning.shards import all_finite, whole


def check_step(
    trainer: Trainer, finite_losses: Tensor | bool, parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Refuse an optimizer step whose losses or gradients are not finite; asks the device once.

    Under `16-mixed` the scaler skips such a step by itself and halves its scale. Only where the scale has fallen
    below 1 it can't be what the gradients overflow from.

    Args:
        trainer: About to step.
        finite_losses: Whether the losses of all micro-batches of the step were finite.
        parameters: With their gradients, by name.

    Raises:
        UserError: Naming the step, the first such gradient's parameter, and the checkpoint to go back to.
    """
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    norm = whole(nn.utils.get_total_norm(gradients.values()))
    # One rank's loss is every rank's: they stop together, or the others would wait for ever.
    agree = trainer.strategy.reduce_boolean_decision
    if agree(bool(norm.isfinite() & finite_losses), all=True) or _left_to_scaler(trainer.precision_plugin):
        return
    finite_losses = agree(bool(finite_losses), all=True)
    what = _first_broken(gradients) if finite_losses else "the loss"
    if what is None:  # only the squares are too large
        return
    raise UserError(
        f"{what} is not finite at optimizer step {trainer.global_step}; {_way_back(trainer)} with a lower learning "
        "rate, or start cooler where the method anneals (model.lam, model.tau)"
    )


def _left_to_scaler(precision: Any) -> bool:
    scaler = getattr(precision, "scaler", None)
    return scaler is not None and scaler.get_scale() >= 1


def _first_broken(gradients: dict[str, Tensor]) -> str | None:
    broken = (name for name, gradient in gradients.items() if not all_finite(gradient))
    name = next(broken, None)
    return name and f"the gradient of {name}"


def _way_back(trainer: Trainer) -> str:
    checkpoint = last_written(trainer)
    return (
        "start again"
        if checkpoint is None
        else f"go on from the last good checkpoint (--ckpt_path {checkpoint!r})"
    )
