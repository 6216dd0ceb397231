"""MaskPro: logits learned by a policy gradient, from the losses of two forward passes and no backward pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.contrib.maskpro.log_probability import log_probability_gradient
from roi_lightning.errors import UserError
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.student import PrunedTensor
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.samplers import StraightThrough
from roi_lightning.samplers.schedules import Constant

# Probabilities are softmax(logits): no temperature but the logits' own scale.
_LAM: Final = 1.0


@dataclass
class MovingAverage:
    """An exponential moving average of what came so far, with weights that sum to 1 from the first value on.

    Attributes:
        decay: How much a value still counts when the next one comes.
        total: Of the weighted values.
        weight: Sum of the weights.
    """

    decay: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """Count one more value."""
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + (1 - self.decay)

    @property
    def value(self) -> float | None:
        """The average; None before the first value."""
        return self.total / self.weight if self.weight else None


class MaskProModule(RoILightningModule):
    """MaskPro: learn one logit per weight by a policy gradient, in the memory of a forward pass.

    Of each group N elements are drawn without replacement, with probabilities softmax(logits); the mask is the N
    largest in the end. A step draws one mask, for all its micro-batches on all ranks, and needs two forward passes:
    the residual is the loss under the draw less the loss under the reference mask, on the same text. The gradient is
    (residual - δ) × ∇ log p, with p the probability of the draw in its order and δ a moving average of the residuals.
    The optimizer takes its step by it; plain SGD is the paper's. Logs `maskpro/residual` and `maskpro/delta`.

    Where the paper was silent, or its words were not at hand, this was chosen:

    - The reference mask is the prior's, or the magnitude mask without a prior. Every `renew_every` steps it becomes
      the hard mask of the logits, and δ starts anew.
    - δ is the average of the residuals before the step, with weights that sum to 1 from the first one on. The first
      step, and the one after a renewal, has none and moves nothing.
    - There is no temperature: `prior_strength`, half the lead of kept over pruned logits, says how often draws
      leave the prior. At 2:4 one group in 135 does at 3, one in 19 at 2, one in 1,000 at 4.
    - All layers are drawn and moved at once, and the loss is the same as for other learners; with distillation the
      dense model runs for both masks.
    - What is learned is fp32, whatever the weights are, and the gradient is made whole for the optimizer.

    Args:
        prior_strength: As in `RoILightningModule`.
        average: Share of δ that stays from one step to the next: MaskPro's α, 0.99.
        renew_every: Optimizer steps after which the reference mask is renewed; None keeps the first.
        kwargs: As in `RoILightningModule`.

    Raises:
        UserError: If `average` is not a fraction below 1 or `renew_every` not a number of steps, and for what helps a
            backward pass: activation checkpointing and precision 16-mixed.
    """

    differentiates = False
    stronger_prior = "raise model.prior_strength"
    fixed_options = ("sampler", "tau", "lam", "draw_per", "kept_norm")

    def __init__(
        self,
        lm: str,
        *,
        prior_strength: float = 3.0,
        average: float = 0.99,
        renew_every: int | None = 100,
        **kwargs: Any,
    ) -> None:
        fixed = Constant(_LAM)
        super().__init__(
            lm,
            sampler=StraightThrough(),
            tau=fixed,
            lam=fixed,
            draw_per="step",
            kept_norm=0.0,
            lr_weights=None,
            prior_strength=prior_strength,
            **kwargs,
        )
        if not 0 <= average < 1:
            raise UserError(f"model.average is {average}; set it to 0 or above and below 1, for example 0.99")
        if renew_every is not None and renew_every < 1:
            raise UserError(
                f"model.renew_every is {renew_every}; set it to a number of optimizer steps, at least 1, or to null"
            )
        if self.activation_checkpointing:
            raise UserError(
                "model.activation_checkpointing saves memory of a backward pass, and MaskProModule has none; set it "
                "to false"
            )
        self.average, self.renew_every = average, renew_every
        self._reference: dict[str, LayerMask] = {}  # by layer
        self._bits: dict[str, Tensor] = {}  # the same by tensor, this rank's part, where the weights are
        self._delta = MovingAverage(average)
        self._residuals: list[Tensor] = []  # of the micro-batches since the last optimizer step

    @property
    @override
    def method(self) -> str:
        return "maskpro"

    @override
    def annealing(self) -> dict[str, float]:
        return {}

    # Starting.

    @override
    def preflight(self, trainer: pl.Trainer) -> None:
        _check_precision(trainer)
        super().preflight(trainer)

    @override
    def setup(self, stage: str) -> None:
        _check_precision(self.trainer)
        super().setup(stage)

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.trainer.ckpt_path is None:
            self._reference = dict(self.prior_masks or self.magnitude_masks)
        self._bits = {name: tensor.bits(self._reference) for name, tensor in self.tensors.items()}

    # Stepping.

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        if not self._residuals:
            self._renew_reference()
        with torch.no_grad():
            loss = super().training_step(batch, batch_idx)
            self.fill(self._write_reference)
            reference, _ = self.objective(batch)
        self._finite = self._finite & reference.isfinite()
        self._residuals.append(loss - reference)
        return loss

    def _renew_reference(self) -> None:
        step = self.trainer.global_step
        if self.renew_every is None or not step or step % self.renew_every:
            return
        self._reference = dict(self.hard_masks())
        self._bits = {name: tensor.bits(self._reference) for name, tensor in self.tensors.items()}
        self._delta = MovingAverage(self.average)

    def _write_reference(self, tensor: PrunedTensor) -> None:
        mask = tensor.from_bits(self._bits[tensor.name])
        tensor.write(tensor.dense.masked_fill(~mask, 0))

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the step's gradient is made of its losses, see `on_before_optimizer_step`."""

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        mean = self.trainer.strategy.reduce(torch.stack(self._residuals).mean(), reduce_op="mean")
        residual = float(mean)
        self._residuals.clear()
        delta = residual if self._delta.value is None else self._delta.value
        self._delta.add(residual)
        self._set_gradients(residual - delta)
        self.log_dict({"maskpro/residual": residual, "maskpro/delta": delta})
        super().on_before_optimizer_step(optimizer)

    def _set_gradients(self, advantage: float) -> None:
        for name, tensor in self.tensors.items():
            gradient = log_probability_gradient(tensor.here("logits"), tensor.pattern, self.draws[name])
            tensor.add_gradient("logits", gradient.mul_(advantage))

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"average": self.average, "renew_every": self.renew_every}

    # Checkpoints.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["reference_masks"] = {name: mask.packed for name, mask in self._reference.items()}
        checkpoint["delta"] = {"total": self._delta.total, "weight": self._delta.weight}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "reference_masks" not in checkpoint:
            raise UserError("the checkpoint is of another learner; give one of a run of MaskProModule")
        super().on_load_checkpoint(checkpoint)
        layers = self.layers
        self._reference = {
            name: LayerMask(packed.cpu(), layers[name].shape, layers[name].transposed)
            for name, packed in checkpoint["reference_masks"].items()
        }
        self._delta = MovingAverage(self.average, **checkpoint["delta"])


def _check_precision(trainer: pl.Trainer) -> None:
    if trainer.precision == "16-mixed":
        raise UserError(
            "trainer.precision '16-mixed' scales the gradients of a backward pass, and MaskProModule has none; use "
            "bf16-mixed or 32-true"
        )
