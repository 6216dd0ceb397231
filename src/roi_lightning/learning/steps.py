"""Training and validation steps of a frozen language model with masked layers, whatever is learned on them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MeanMetric
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.learning.losses import next_token_logits, next_token_nll, objective
from roi_lightning.learning.nonfinite import check_step
from roi_lightning.samplers.masked_linear import LayerState, MaskedLinear, fixed_masks, in_mode


class MaskedSteps(pl.LightningModule, ABC):
    """Minimises the objective in `sample` mode, and validates under the hard masks.

    Args:
        distillation: Share of the loss, from 0 to 1, that is the divergence from the dense model.

    Raises:
        UserError: If that is no such share.

    Attributes:
        differentiates: Whether a step has a backward pass.
        layers: The masked layers by name.
        state: Which all of them share.
    """

    differentiates: ClassVar[bool] = True
    layers: Mapping[str, MaskedLinear]
    state: LayerState

    def __init__(self, distillation: float) -> None:
        super().__init__()
        if not 0 <= distillation <= 1:
            raise UserError(
                f"model.distillation is {distillation}; set it to a fraction of the loss, from 0 to 1"
            )
        self.distillation = distillation
        self._val_nll = MeanMetric()
        self._losses_finite: Tensor | bool = True
        self._micro_batches: list[tuple[Tensor, int]] = []  # since the last optimizer step
        self._validation_masks: AbstractContextManager[None] | None = None

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The language model."""

    @abstractmethod
    def prepare_step(self, batch_idx: int) -> None:
        """Set up the forward pass of one micro-batch."""

    def hard_masks(self) -> Iterator[tuple[str, Tensor]]:
        """Layer name and boolean mask [out, in], one layer at a time."""
        return ((name, layer.hard_mask()) for name, layer in self.layers.items())

    def under_masks(self, masks: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        """Run the model under given masks by layer name, or under its own hard ones."""
        return fixed_masks(self.layers, masks)

    def dense(self) -> AbstractContextManager[None]:
        """Run the model unpruned."""
        return in_mode(self.state, "dense")

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        self._micro_batches.append((batch["input_ids"], batch_idx))
        self.prepare_step(batch_idx)
        loss, divergence = objective(
            self.model, batch["input_ids"], self.distillation, self.dense(), batch.get("labels")
        )
        # Looked at once per optimizer step: asking here would make the host wait for every micro-batch.
        self._losses_finite = self._losses_finite & loss.detach().isfinite()
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True)
        if divergence is not None:
            self.log("train/divergence", divergence.detach(), sync_dist=True)
        return loss

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        check_step(
            self.trainer, self._losses_finite, self.named_parameters(), self.layers, self._repeat_forward
        )
        self._losses_finite = True
        self._micro_batches.clear()

    def _repeat_forward(self) -> None:
        """The forward passes since the last optimizer step, on the same text with the same masks."""
        with torch.no_grad(), self.trainer.precision_plugin.train_step_context():
            for input_ids, batch_idx in self._micro_batches:
                self.prepare_step(batch_idx)
                next_token_logits(self.model, input_ids)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # The loop frees gradients only after the next forward pass, which needs that memory.
        self.zero_grad()

    @override
    def on_validation_start(self) -> None:
        self._validation_masks = self.under_masks()
        self._validation_masks.__enter__()

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        nll, count = next_token_nll(self.model, batch["input_ids"], batch.get("labels"))
        self._val_nll.update(nll / count, weight=count)

    @override
    def on_validation_epoch_end(self) -> None:
        nll = self._val_nll.compute()
        self._val_nll.reset()
        self.log("val/nll", nll, sync_dist=True)
        self.log("val/perplexity", nll.exp(), prog_bar=True, sync_dist=True)

    @override
    def on_validation_end(self) -> None:
        assert self._validation_masks is not None
        self._validation_masks.__exit__(None, None, None)
        self._validation_masks = None
