"""Stop on a loss or gradient that is infinite or NaN, before the optimizer step."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from roi_lightning.errors import UserError
from roi_lightning.learning.resume import last_written
from roi_lightning.utils.dtensor import all_finite, full_tensor


def check_step(
    trainer: Trainer,
    finite_losses: Tensor | bool,
    parameters: Iterable[tuple[str, nn.Parameter]],
    layers: Mapping[str, nn.Module],
    forward: Callable[[], object],
) -> None:
    """Refuse an optimizer step whose losses or gradients are not finite; synchronises with the device once.

    Under `16-mixed` the scaler skips such a step by itself and halves its scale. Only where the scale has fallen
    below 1 it can't be what the gradients overflow from.

    Args:
        trainer: About to step.
        finite_losses: Whether the losses of all micro-batches of the step were finite.
        parameters: With their gradients, by name.
        layers: Those to look for a loss's origin in, by name.
        forward: Repeats the step's forward passes.

    Raises:
        UserError: Naming the step, the layer where it began or the first such gradient's parameter, and the
            checkpoint to go back to.
    """
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    norm = full_tensor(nn.utils.get_total_norm(gradients.values()))
    # One rank's loss is every rank's: they stop together, or the others would wait forever.
    agree = trainer.strategy.reduce_boolean_decision
    if agree(bool(norm.isfinite() & finite_losses), all=True) or _left_to_scaler(trainer.precision_plugin):
        return
    finite_losses = agree(bool(finite_losses), all=True)
    what = _first_broken(gradients) if finite_losses else _broken_loss(trainer, layers, forward)
    if what is None:  # only the squares are too large
        return
    raise UserError(
        f"{what} is not finite at optimizer step {trainer.global_step}; {_recovery_hint(trainer)} with a lower "
        "learning rate, or start cooler where the method anneals (model.lam, model.tau)"
    )


def _left_to_scaler(precision: Any) -> bool:
    scaler = getattr(precision, "scaler", None)
    return scaler is not None and scaler.get_scale() >= 1


def _first_broken(gradients: dict[str, Tensor]) -> str | None:
    broken = (name for name, gradient in gradients.items() if not all_finite(gradient))
    name = next(broken, None)
    return name and f"the gradient of {name}"


def _broken_loss(trainer: Trainer, layers: Mapping[str, nn.Module], forward: Callable[[], object]) -> str:
    """The loss, and the layer whose output is the first that is not finite on any rank."""
    names = list(layers)
    found = first_broken_output(layers, forward)
    index = len(names) if found is None else names.index(found)
    on_device = torch.tensor(index, device=trainer.strategy.root_device)
    earliest = int(trainer.strategy.reduce(on_device, reduce_op="min"))
    return "the loss" if earliest == len(names) else f"after the output of {names[earliest]} the loss"


def first_broken_output(layers: Mapping[str, nn.Module], forward: Callable[[], object]) -> str | None:
    """The name of the first layer whose output is not finite in a forward pass; None if all are."""
    broken: list[str] = []

    def check(name: str, _layer: nn.Module, _inputs: object, output: Tensor) -> None:
        if not broken and not all_finite(output.detach()):
            broken.append(name)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_hook(partial(check, name)).remove)
        forward()
    return broken[0] if broken else None


def _recovery_hint(trainer: Trainer) -> str:
    checkpoint = last_written(trainer)
    if checkpoint is None:
        return "start again"
    return f"resume from the last good checkpoint (--ckpt_path {checkpoint!r})"
