"""RoI as a LightningModule: a frozen language model, one logit per weight, two temperatures that anneal."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import WITH_WEIGHTS
from roi_lightning.learning.logits import LogitLearningModule
from roi_lightning.samplers import Draw, GumbelTopK, KeptNorm, Sampler
from roi_lightning.samplers.joint_linear import JointLinear
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear, attach
from roi_lightning.samplers.schedules import Exponential, Schedule


class RoILightningModule(LogitLearningModule):
    """Reservoir of Importance: learn one logit per weight with relaxed Gumbel-Top-K masks.

    Args:
        sampler: `GumbelTopK` (soft masks in training), `StraightThrough`, `GumbelSubset` (soft without an order of
            picks; not in the paper), or MaskLLM's `Categorical`.
        tau: Softmax temperature τ by optimizer step (Equation 13).
        lam: Sampling temperature λ by optimizer step (Equation 13).
        draw_per: A fresh mask for every micro-batch (the paper's Monte Carlo estimate), or one for all
            micro-batches of an optimizer step.
        kept_norm: Coefficient of the reward for keeping large weights: the loss is lowered by it times the
            squared norm of the drawn weights, summed over layers (1e-5 in MaskLLM); it goes to 0 on a straight
            line over the run. 0 in RoI's paper.
        lr_weights: Train the weights along with the logits, at this learning rate in the first step; it falls to the
            same fraction as the optimizer's own. Left out, they are frozen, as in the paper.
        kwargs: As in `LogitLearningModule`.

    Raises:
        UserError: If `kept_norm` or `lr_weights` is no such number, or the sampler can't learn the pattern.
    """

    stronger_prior = (
        "raise model.prior_strength, lower model.lam.start, or add --config overlays/small_budget.yaml"
    )

    def __init__(
        self,
        lm: str,
        *,
        sampler: Sampler = GumbelTopK(),  # noqa: B008 - frozen
        tau: Schedule = Exponential(1.0, 0.05),  # noqa: B008 - frozen
        lam: Schedule = Exponential(1.0, 0.002),  # noqa: B008 - frozen
        draw_per: Literal["micro_batch", "step"] = "micro_batch",
        kept_norm: float = 0.0,
        lr_weights: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(lm, **kwargs)
        if not 0 <= kept_norm < math.inf:
            raise UserError(f"model.kept_norm is {kept_norm}; set it to a factor of the loss, 0 or above")
        if lr_weights is not None and not 0 < lr_weights < math.inf:
            raise UserError(
                f"model.lr_weights is {lr_weights}; set it to a learning rate above 0, such as 2e-4, or to null to "
                "leave the weights frozen"
            )
        self.sampler, self.tau, self.lam = sampler, tau, lam
        self.draw_per, self.kept_norm, self.lr_weights = draw_per, kept_norm, lr_weights
        self.learns = "logits" if lr_weights is None else "logits and weights"
        self.state = SharedState(self.pattern, sampler=sampler)
        # Asked now, so that a pattern the sampler cannot learn is refused before anything is read.
        for pattern in self.pattern.distinct:
            sampler.logits_shape((1, pattern.m), pattern)

    @override
    def attach(self, lm: PreTrainedModel, layers: dict[str, nn.Linear | Conv1D]) -> dict[str, SparseLinear]:
        if self.lr_weights is None:
            return attach(lm, layers, self.state, SparseLinear)
        return dict(attach(lm, layers, self.state, JointLinear))

    @property
    @override
    def method(self) -> str:
        name = self.state.sampler.method
        return name if self.lr_weights is None else f"{name}{WITH_WEIGHTS}"

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        if self.lr_weights is None:
            return super().parameter_groups()
        layers = self.layers.values()
        return [
            {"params": [layer.logits for layer in layers]},
            {"params": [layer.get_parameter("trained") for layer in layers], "lr": self.lr_weights},
        ]

    @override
    def annealing(self) -> dict[str, float]:
        step, total = self.trainer.global_step, self.trainer.max_steps
        return {"anneal/tau": self.tau.at(step, total), "anneal/lambda": self.lam.at(step, total)}

    @property
    @override
    def first_lam(self) -> float:
        return self.lam.at(0, self.trainer.max_steps)

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        total = self.trainer.max_steps
        tau = max(self.tau.at(0, total), self.tau.at(total, total))
        for pattern in self.pattern.distinct:
            if advice := self.state.sampler.advice(pattern, tau):
                rank_zero_info(advice)

    # Stepping.

    @override
    def prepare_step(self, batch_idx: int) -> None:
        step, total = self.trainer.global_step, self.trainer.max_steps
        self.state.mode = "sample"
        self.state.draw = Draw(
            self.seed, self._draw_index(step, batch_idx), self.lam.at(step, total), self.tau.at(step, total)
        )
        coefficient = self.kept_norm * (1 - step / total)
        self.state.kept_norm = KeptNorm(coefficient) if coefficient > 0 else None

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        reward = self.state.kept_norm
        if reward is None:
            return loss
        assert reward.value is not None
        self.log("train/kept_norm", reward.value.detach(), sync_dist=True)
        return loss - reward.coefficient * reward.value

    def _draw_index(self, step: int, batch_idx: int) -> int:
        parts = self.trainer.accumulate_grad_batches
        part = batch_idx % parts if self.draw_per == "micro_batch" else 0
        # Ranks draw different masks: more samples of the mask per step.
        return (step * parts + part) * self.trainer.world_size + self.trainer.global_rank

    @override
    def settings(self) -> dict[str, object]:
        names = ("sampler", "tau", "lam", "draw_per", "kept_norm")
        weights = {} if self.lr_weights is None else {"lr_weights": self.lr_weights}
        return super().settings() | {name: getattr(self, name) for name in names} | weights

    # Export.

    @override
    def updates(self) -> dict[str, Tensor]:
        if self.lr_weights is None:
            return super().updates()
        return {
            stored: self.layers[name].as_stored(self.layers[name].hard_weight(), self.base[stored].dtype)
            for name, stored in self.stored_weights.items()
        }
