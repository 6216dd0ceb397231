"""MaskPro: logits learned by a policy gradient, from the losses of two forward passes and no backward pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.contrib.maskpro.log_probability import log_probability_gradient
from roi_lightning.errors import UserError
from roi_lightning.learning.losses import objective
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.layer_mask import unpack_bits
from roi_lightning.models.layers import LinearLayer
from roi_lightning.samplers import Draw, StraightThrough
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear, attach
from roi_lightning.samplers.noise import noise_key
from roi_lightning.samplers.schedules import Constant
from roi_lightning.utils.dtensor import distribute_like, full_tensor

# Probabilities are softmax(logits): no temperature but the logits' own scale.
_LAM: Final = 1.0


@dataclass(kw_only=True)
class ComparedState(SharedState):
    """What all layers of `MaskProModule` have in common.

    Attributes:
        reference: Whether a forward pass in `sample` mode takes the reference mask in place of a draw.
    """

    reference: bool = False


class ComparedLinear(SparseLinear):
    """A layer with logits, and with the reference mask that draws are compared with.

    Attributes:
        reference: The mask, a bit per weight, as `LayerMask` has it; uint8 [out, ceil(in / 8)].
    """

    state: ComparedState
    reference: Tensor

    def __init__(self, dense: LinearLayer, name: str, state: ComparedState) -> None:
        super().__init__(dense, name, state)
        rows, columns = self.weight.shape
        packed = torch.zeros((rows, -(-columns // 8)), dtype=torch.uint8, device=self.weight.device)
        self.register_buffer("reference", packed, persistent=False)

    @override
    def drawn_weight(self) -> Tensor:
        if not self.state.reference:
            return super().drawn_weight()
        return self.weight.masked_fill(~unpack_bits(self.reference, self.weight.shape[1]), 0)


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
        average: How much of δ stays from one step to the next: MaskPro's α, 0.99.
        renew_every: Optimizer steps after which the reference mask is renewed; None keeps the first.
        kwargs: As in `RoILightningModule`.

    Raises:
        UserError: If `average` is not a fraction below 1 or `renew_every` not a number of steps, and for what helps a
            backward pass: activation checkpointing and precision 16-mixed.
    """

    differentiates = False
    stronger_prior = "raise model.prior_strength"
    fixed_options = ("sampler", "tau", "lam", "draw_per", "kept_norm")
    layers: Mapping[str, ComparedLinear]
    state: ComparedState

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
        self.state = ComparedState(self.pattern, sampler=self.sampler)
        self._delta = MovingAverage(average)
        self._residuals: list[Tensor] = []  # of the micro-batches since the last optimizer step

    @override
    def attach(self, lm: PreTrainedModel, layers: dict[str, LinearLayer]) -> dict[str, ComparedLinear]:
        return attach(lm, layers, self.state, ComparedLinear)

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
            masks = self.prior_masks or self.magnitude_masks
            for name, layer in self.layers.items():
                layer.reference.copy_(masks[name].packed)

    # Stepping.

    @override
    def prepare_step(self, batch_idx: int) -> None:
        self.state.mode = "sample"
        self.state.draw = Draw(self.seed, self.trainer.global_step, _LAM, tau=1.0)

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        if not self._residuals:
            self._renew_reference()
        with torch.no_grad():
            loss = super().training_step(batch, batch_idx)
            with self._under_reference():
                reference, _ = objective(
                    self.model, batch["input_ids"], self.distillation, self.dense(), batch.get("labels")
                )
        self._losses_finite = self._losses_finite & reference.isfinite()
        self._residuals.append(loss - reference)
        return loss

    def _renew_reference(self) -> None:
        step = self.trainer.global_step
        if self.renew_every is None or not step or step % self.renew_every:
            return
        for name, mask in self.hard_masks():
            layer = self.layers[name]
            layer.reference.copy_(layer.packed(mask).packed)
        self._delta = MovingAverage(self.average)

    @contextmanager
    def _under_reference(self) -> Iterator[None]:
        self.state.reference = True
        try:
            yield
        finally:
            self.state.reference = False

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
        for name, layer in self.layers.items():
            key = noise_key(self.seed, self.trainer.global_step, name)
            logits = full_tensor(layer.logits.detach())
            gradient = log_probability_gradient(logits, layer.pattern, key).mul_(advantage)
            layer.logits.grad = distribute_like(gradient, layer.logits)

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"average": self.average, "renew_every": self.renew_every}

    # Checkpoints.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["reference_masks"] = {name: layer.reference.cpu() for name, layer in self.layers.items()}
        checkpoint["delta"] = {"total": self._delta.total, "weight": self._delta.weight}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "reference_masks" not in checkpoint:
            raise UserError("the checkpoint is of another learner; give one of a run of MaskProModule")
        super().on_load_checkpoint(checkpoint)
        for name, packed in checkpoint["reference_masks"].items():
            self.layers[name].reference.copy_(packed)
        self._delta = MovingAverage(self.average, **checkpoint["delta"])


def _check_precision(trainer: pl.Trainer) -> None:
    if trainer.precision == "16-mixed":
        raise UserError(
            "trainer.precision '16-mixed' scales the gradients of a backward pass, and MaskProModule has none; use "
            "bf16-mixed or 32-true"
        )
