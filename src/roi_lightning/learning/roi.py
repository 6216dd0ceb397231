"""RoI as a LightningModule: a frozen language model, one logit per weight, two temperatures that anneal."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError, check_at_least
from roi_lightning.export.sidecar import WITH_WEIGHTS
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.logits import LogitStart
from roi_lightning.learning.student import PrunedTensor
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.config import NamedModel
from roi_lightning.samplers import Draw, GumbelTopK, Sampler, on_device
from roi_lightning.samplers.schedules import Constant, Exponential, Schedule
from roi_lightning.utils.entry_points import named

_SAMPLERS: Final = ("GumbelTopK", "StraightThrough", "GumbelSubset", "Categorical")
_SCHEDULES: Final = ("Constant", "Exponential", "Linear", "LinearScale")


class RoILightningModule(MaskLearningModule):
    """Reservoir of Importance: learn one logit per weight with relaxed Gumbel-Top-K masks.

    Args:
        sampler: `GumbelTopK` (soft masks in training), `StraightThrough`, `GumbelSubset` (soft without an order of
            picks; not in the paper), or MaskLLM's `Categorical`.
        tau: Schedule of τ, how soft the masks are (softmax temperature, the paper's Equation 13).
        lam: Schedule of λ, how much noise the draws have (sampling temperature, the paper's Equation 13).
        draw_per: How often to draw a mask: for every micro-batch (as in the paper), or once per optimizer step, for
            all micro-batches and ranks.
        kept_norm: Reward for keeping large weights: this number times the squared norm of the drawn weights, summed
            over layers, is subtracted from the loss. MaskLLM uses 1e-5, RoI's paper 0. It falls linearly to 0.
        lr_weights: Train the weights too, at this learning rate in the first step; it falls to the same fraction as
            the optimizer's. If left out, the weights stay frozen, as in the paper.
        init_std: Standard deviation of the random logits at the start; 0.01 in RoI's paper.
        prior: Mask that the logits start from: `none` (random logits), `magnitude`, `activation` (Wanda's score on
            the dense model, one pass), `wanda` or `sparsegpt` (block by block; no weight changes), a mask file, or
            an exported directory.
        prior_strength: Added at the start to the logits of weights that the prior keeps, subtracted from the rest.
        prior_margin: Lead that the prior gets when the mask is hardened: a weight replaces one that the prior keeps
            only if its logit is larger by more than twice this number. It has no effect on training.
        prior_windows: Number of training windows that `activation`, `wanda` and `sparsegpt` are measured on.
        kwargs: As in `MaskLearningModule`.

    Raises:
        UserError: If a number can't be used, there is no such prior, or the sampler can't learn the pattern.

    Attributes:
        stronger_prior: What gives a prior more weight in the first draws, in words.
        fixed_options: Those of drawing that a subclass sets itself.
        current_sampler: The one in use, `sampler` until a callback takes another.
        draws: Of the present training step, by tensor.
    """

    stronger_prior: ClassVar[str] = (
        "raise model.prior_strength, lower model.lam.start, or add --config overlays/small_budget.yaml"
    )
    fixed_options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        lm: NamedModel,
        *,
        sampler: Sampler | str = GumbelTopK(),  # noqa: B008 - frozen
        tau: Schedule | float | str = Exponential(1.0, 0.05),  # noqa: B008 - frozen
        lam: Schedule | float | str = Exponential(1.0, 0.002),  # noqa: B008 - frozen
        draw_per: Literal["micro_batch", "step"] = "micro_batch",
        kept_norm: float = 0.0,
        lr_weights: float | None = None,
        init_std: float = 0.01,
        prior: str = "none",
        prior_strength: float = 0.015,
        prior_margin: float = 0.0,
        prior_windows: int = 24,
        **kwargs: Any,
    ) -> None:
        super().__init__(lm, **kwargs)
        self.start = LogitStart(init_std, prior, prior_strength, prior_margin, prior_windows)
        if lr_weights is not None and not 0 < lr_weights < math.inf:
            raise UserError(
                f"model.lr_weights is {lr_weights}; set it to a learning rate above 0, such as 2e-4, or to null to "
                "leave the weights frozen"
            )
        self.sampler = self.current_sampler = named(Sampler, sampler, "model.sampler", _SAMPLERS)  # type: ignore[type-abstract]
        self.tau, self.lam = (
            Constant(x) if isinstance(x, int | float) else named(Schedule, x, f"model.{name}", _SCHEDULES)  # type: ignore[type-abstract]
            for name, x in (("tau", tau), ("lam", lam))
        )
        self.draw_per, self.kept_norm, self.lr_weights = draw_per, kept_norm, lr_weights
        check_at_least(self, "model.", kept_norm=0)
        self.learns = "logits" if lr_weights is None else "logits and weights"
        self.draws: dict[str, Draw] = {}
        self._reward: Tensor | None = None  # the squared norm of the drawn weights
        # Asked now, so that a pattern the sampler cannot learn is refused before anything is read.
        for pattern in self.pattern.distinct:
            self.sampler.logits_shape((1, pattern.m), pattern)

    @override
    def shapes(self, shape: tuple[int, ...], pattern: NMPattern) -> dict[str, tuple[int, ...]]:
        logits = {"logits": self.current_sampler.logits_shape(shape, pattern)}
        return logits if self.lr_weights is None else logits | {"trained": shape}

    @override
    def begin(self, tensor: PrunedTensor) -> None:
        if self.lr_weights is not None:
            tensor.here("trained").copy_(tensor.dense)

    @property
    @override
    def method(self) -> str:
        name = self.current_sampler.method
        return name if self.lr_weights is None else f"{name}{WITH_WEIGHTS}"

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        if self.lr_weights is None:
            return super().parameter_groups()
        learned = [tensor.learned for tensor in self.tensors.values()]
        logits, trained = ([own[kind] for own in learned] for kind in ("logits", "trained"))
        return [{"params": logits}, {"params": trained, "lr": self.lr_weights}]

    @override
    def annealing(self) -> dict[str, float]:
        step, total = self.trainer.global_step, self.trainer.max_steps
        return {"anneal/tau": self.tau.at(step, total), "anneal/lambda": self.lam.at(step, total)}

    # Starting.

    @override
    def preflight(self, trainer: pl.Trainer) -> None:
        self.start.check_strategy(trainer, self.source.spec, self.pattern)
        super().preflight(trainer)

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        sampler, total = self.current_sampler, self.trainer.max_steps
        if self.trainer.ckpt_path is None:
            self.start.warn_if_weak(sampler, self.pattern, self.lam.at(0, total), self.stronger_prior)
            self.start.initialise(self, sampler)
        tau = max(self.tau.at(0, total), self.tau.at(total, total))
        for pattern in self.pattern.distinct:
            if advice := sampler.advice(pattern, tau):
                rank_zero_info(advice)

    # Stepping.

    @override
    def prepare_step(self, batch_idx: int) -> None:
        step, total = self.trainer.global_step, self.trainer.max_steps
        index, lam, tau = (
            self._draw_index(step, batch_idx),
            self.lam.at(step, total),
            self.tau.at(step, total),
        )
        draws = [
            Draw.of(self.seed, index, name, lam, tau, tensor.first_group)
            for name, tensor in self.tensors.items()
        ]
        device = next(iter(self.tensors.values())).teacher.device
        self.draws = dict(zip(self.tensors, on_device(draws, device), strict=True))

    def _draw_index(self, step: int, batch_idx: int) -> int:
        """Name a draw by its step and its place there, so that none comes again in other micro-batches."""
        place = batch_idx % self.trainer.accumulate_grad_batches
        if self.device_mesh is None:  # ranks that share a model share its draws
            place = place * self.trainer.world_size + self.trainer.global_rank
        return step if self.draw_per == "step" else step + (place << 32)

    @override
    def training_weight(self, tensor: PrunedTensor, **learned: Tensor) -> Tensor:
        """The weight under the mask that is drawn now."""
        weight, draw = self._weight(tensor), self.draws[tensor.name]
        return self.current_sampler.masked_weight(weight, learned["logits"], tensor.pattern, draw)

    def _weight(self, tensor: PrunedTensor) -> Tensor:
        """What masks are drawn of: this rank's part of the weight."""
        if self.lr_weights is None:
            return tensor.dense
        return tensor.here("trained").to(tensor.teacher.dtype)

    @override
    def draw(self, tensor: PrunedTensor) -> None:
        drawn = tensor.masked  # the student's memory, where that is contiguous
        arguments = self._weight(tensor), tensor.here("logits"), tensor.pattern, self.draws[tensor.name]
        self.current_sampler.fill(drawn, *arguments)
        tensor.write(drawn)

    @override
    def collect(self, tensor: PrunedTensor, gradient: Tensor) -> None:
        weight = self._weight(tensor)
        job = weight, tensor.here("logits"), tensor.pattern, self.draws[tensor.name]
        own = self.current_sampler.logits_gradient(gradient, *job)
        if self._reward is not None:
            assert self._reward.grad is not None
            # The norm's own gradient is twice the drawn weight; in bfloat16 it would be lost in `gradient`.
            of_norm = self.current_sampler.logits_gradient(tensor.masked, *job)
            own.addcmul_(of_norm, self._reward.grad, value=2)
        tensor.add_gradient("logits", own)
        if self.lr_weights is not None:
            mask = (tensor.masked / weight).masked_fill_(weight == 0, 0)
            tensor.add_gradient("trained", mask.mul_(gradient).float())

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        coefficient = self.kept_norm * (1 - self.trainer.global_step / self.trainer.max_steps)
        self._reward = None
        if not coefficient:
            return loss
        masked = [tensor.masked for tensor in self.tensors.values()]
        wide = torch.promote_types(masked[0].dtype, torch.float32)
        total = torch.stack([torch.linalg.vector_norm(x, dtype=wide) for x in masked]).square().sum().float()
        if self.device_mesh is not None:  # ranks have a part each
            dist.all_reduce(total)
        self._reward = total.requires_grad_()
        self.log("train/kept_norm", self._reward.detach(), sync_dist=True)
        return loss - coefficient * self._reward

    @override
    def hard_mask(self, tensor: PrunedTensor) -> Tensor:
        logits = tensor.whole("logits")
        if self.prior_masks and self.start.prior_margin:
            prior = tensor.mask(self.prior_masks).to(logits.device)
            logits = self.current_sampler.initial_logits(
                logits, prior, self.start.prior_margin, tensor.pattern
            )
        return self.current_sampler.hard_mask(logits, tensor.pattern)

    @override
    def hard_weight(self, tensor: PrunedTensor) -> Tensor:
        weight = tensor.dense if self.lr_weights is None else tensor.here("trained")
        return tensor.pruned(weight, self.hard_mask(tensor))

    @override
    def choices(self, tensor: PrunedTensor) -> tuple[Tensor, int]:
        choices = self.current_sampler.choices(tensor.whole("logits"), tensor.pattern)
        return choices, self.current_sampler.picks(tensor.pattern)

    @override
    def settings(self) -> dict[str, object]:
        names = ("sampler", "tau", "lam", "draw_per", "kept_norm")
        weights = {} if self.lr_weights is None else {"lr_weights": self.lr_weights}
        sampling = {name: getattr(self, name) for name in names if name not in self.fixed_options}
        return super().settings() | self.start.settings() | sampling | weights

    # Checkpoints and export.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["prior_masks"] = {name: mask.packed for name, mask in self.prior_masks.items()}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        layers = self.layers
        for name, packed in checkpoint["prior_masks"].items():
            self.prior_masks[name] = LayerMask(packed.cpu(), layers[name].shape, layers[name].transposed)

    @property
    @override
    def prior_name(self) -> str | None:
        return self.start.name if self.prior_masks else None

    @override
    def updates(self) -> dict[str, Tensor]:
        if self.lr_weights is None:
            return {}
        return self.as_stored(self.hard_weight, lambda stored: self.base[stored].dtype)
