"""What every mask learner shares: the frozen model, the steps, the optimizer, the checkpoint, the way out.

A learner says how its parameters sit on the layers, how a training step draws, and what its hard masks are;
everything else happens here, so that two methods differ in nothing but themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.checkpoints import check_belongs, mark_checkpoint
from roi_lightning.errors import UserError
from roi_lightning.export.fit import base_model
from roi_lightning.finite import check_step
from roi_lightning.language_model import DType, enable_checkpointing, load_language_model
from roi_lightning.loss import kl_sum, next_token_logits, next_token_nll, nll_sum
from roi_lightning.masks import BaseModel, LayerMask, MaskSet
from roi_lightning.optimization import Decay, decay_to, keep_configured
from roi_lightning.pattern import NMPattern
from roi_lightning.prunable import check_model, check_pattern, prunable_layers
from roi_lightning.recipe import Recipe, options, run_recipe, spelled
from roi_lightning.resuming import align_loops
from roi_lightning.run_settings import check_optimizer, check_sharded_optimizer, check_trainer
from roi_lightning.sharding import shard
from roi_lightning.sources import ModelSource, resolve_model
from roi_lightning.sparse_linear import LayerState, MaskedLinear, fixed_masks, in_mode
from roi_lightning.stored_names import stored_weights


class MaskLearner(pl.LightningModule, ABC):
    """Learns a mask over the linear layers of a frozen causal language model.

    Args:
        lm: Hub id, directory, or GGUF file (`gguf:PATH`, or `smollm2-135m`).
        pattern: N:M, N kept of every M consecutive inputs; see `NMPattern` for what an integer means.
        revision: Branch, tag or commit of a hub id.
        dtype: Of the frozen weights; `auto` takes the stored one (bfloat16 for GGUF). What is learned is fp32.
        targets: Glob patterns of the linear layers to prune.
        ignore: Glob patterns of layers to leave dense.
        optimizer: Made from the trainable parameters.
        lr_end: Learning rate at the end of the run, to which the optimizer's own decays.
        lr_schedule: How: `cosine` (half of one) or `linear`.
        lr_warmup: Share of the run, below 1, over which the learning rate rises from 0 on a straight line before.
        distillation: Share of the loss, from 0 to 1, that is not the text's cross-entropy (the paper's only
            term) but the divergence of the masked model's next-token distribution from the dense model's; any
            above 0 costs one more forward pass per micro-batch, and no second copy of the model.
        activation_checkpointing: Recompute activations in the backward pass to save memory.
        attn_implementation: Passed to transformers (`sdpa`, `eager`, `flash_attention_2`).
        trust_remote_code: Let the model repository's own Python code run.
        seed: Of initial values and noise; linked to `seed_everything` on the command line.

    Raises:
        UserError: From `preflight`, before any weight is read.
    """

    lm: PreTrainedModel | None
    layers: Mapping[str, MaskedLinear]
    state: LayerState

    def __init__(
        self,
        lm: str,
        pattern: str | int = "2:4",
        revision: str | None = None,
        dtype: DType = "auto",
        targets: Sequence[str] = ("*",),
        ignore: Sequence[str] = (),
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_end: float = 1e-4,
        lr_schedule: Decay = "cosine",
        lr_warmup: float = 0.0,
        distillation: float = 0.0,
        activation_checkpointing: bool = False,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= distillation <= 1:
            raise UserError(
                f"model.distillation is {distillation}; set it to a share of the loss, from 0 to 1"
            )
        self.distillation = distillation
        self.source: ModelSource = resolve_model(lm, revision)
        self.pattern, self.dtype_name, self.seed = NMPattern(pattern), dtype, seed
        self.targets, self.ignore = list(targets), list(ignore)
        self.optimizer, self.lr_end = optimizer, lr_end
        self.lr_schedule, self.lr_warmup = lr_schedule, lr_warmup
        self.activation_checkpointing = activation_checkpointing
        self.attn_implementation, self.trust_remote_code = attn_implementation, trust_remote_code
        self.lm, self.layers = None, {}
        self.prior_masks: dict[str, LayerMask] = {}
        self.run_recipe: Recipe = {}  # of the run, once it begins
        # Checkpoints hold what is learned; the frozen weights come from the model itself.
        self.strict_loading = False
        self._val_nll = MeanMetric()
        self._losses_finite: Tensor | bool = True
        self._tried: list[tuple[Tensor, int]] = []  # micro-batches since the last optimizer step
        self._base: BaseModel | None = None
        self._validation_masks: AbstractContextManager[None] | None = None

    # What a method adds.

    @abstractmethod
    def attach(
        self, lm: PreTrainedModel, layers: dict[str, nn.Linear | Conv1D]
    ) -> Mapping[str, MaskedLinear]:
        """Put what is learned on the layers; returns the learning layers by the same names."""

    @abstractmethod
    def learned_per_layer(self, weight: tuple[int, ...], dim: int) -> int:
        """How many parameters are learned for a weight of this shape and input dimension."""

    @abstractmethod
    def prepare_step(self, batch_idx: int) -> None:
        """Set up the forward pass of one micro-batch."""

    @property
    @abstractmethod
    def method(self) -> str:
        """The method's short name in tables and files."""

    def annealing(self) -> dict[str, float]:
        """What changes with the step by a schedule of the method's own, by tag; to be watched."""
        return {}

    # Masks.

    def hard_masks(self) -> Iterator[tuple[str, Tensor]]:
        """Layer name and boolean mask of the weight's shape, one layer at a time."""
        return ((name, layer.hard_mask()) for name, layer in self.layers.items())

    def under_masks(self, masks: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        """Run the model under given masks by layer name, or under its own hard ones."""
        return fixed_masks(self.layers, masks)

    def dense(self) -> AbstractContextManager[None]:
        """Run the model unpruned."""
        return in_mode(self.state, "dense")

    # Building.

    def preflight(self, trainer: pl.Trainer) -> None:
        """Check all settings, and names and shapes on the meta device, before text or weights are read.

        Args:
            trainer: The one that will run this learner.

        Raises:
            UserError: For a setting that can't be used, an unreadable model, patterns that match nothing, or a
                layer M does not divide.
        """
        check_trainer(trainer)
        self.check_settings()
        if isinstance(trainer.strategy, ModelParallelStrategy):
            check_sharded_optimizer(self.optimizer)
        check_model(self.source, self.pattern, self.targets, self.ignore, self.trust_remote_code)

    def check_settings(self) -> None:
        """Check what only shows when it is used.

        Raises:
            UserError: For an optimizer that can't be made, or a file that does not fit.
        """
        check_optimizer(self.optimizer, self.lr_end, self.lr_warmup)

    def load_lm(self) -> PreTrainedModel:
        """The model to learn on, frozen; override it to learn on one of your own."""
        return load_language_model(
            self.source, self.dtype_name, self.trust_remote_code, self.attn_implementation
        )

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.run_recipe = run_recipe(self, self.trainer, self.trainer.datamodule)  # type: ignore[attr-defined]

    @override
    def configure_model(self) -> None:
        if self.lm is not None:
            return
        if self._trainer is not None:
            check_trainer(self.trainer)
        lm = self.load_lm()
        if self.activation_checkpointing:
            enable_checkpointing(lm)
        layers = prunable_layers(lm, self.targets, self.ignore)
        check_pattern(layers, self.pattern)
        self.layers = self._attached(lm, layers)
        self.lm = lm
        learned = sum(p.numel() for p in lm.parameters() if p.requires_grad)
        rank_zero_info(
            f"{self.source.spec}: {learned:,} parameters to learn on {len(layers)} layers, {self.pattern}"
        )

    def _attached(
        self, lm: PreTrainedModel, layers: dict[str, nn.Linear | Conv1D]
    ) -> Mapping[str, MaskedLinear]:
        if self.device_mesh is None:
            return self.attach(lm, layers)
        attached: dict[str, MaskedLinear] = {}

        def attach_to(block: str) -> None:
            mine = {name: layer for name, layer in layers.items() if name.startswith(f"{block}.")}
            attached.update(self.attach(lm, mine))

        shard(lm, self.device_mesh["data_parallel"], attach_to)
        return attached

    @property
    def model(self) -> PreTrainedModel:
        """The language model, built if need be."""
        self.configure_model()
        assert self.lm is not None
        return self.lm

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer, schedule = self._configured()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _configured(self) -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        steps = self.trainer.max_steps
        return optimizer, decay_to(optimizer, self.lr_end, steps, self.lr_schedule, self.lr_warmup)

    @override
    def on_fit_start(self) -> None:
        # Asked now, so that a model whose tensors go by other names on disk is refused before it is trained.
        self.stored_weights()

    @override
    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is not None:
            keep_configured(self.trainer, *self._configured())

    # Steps.

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        self._tried.append((batch["input_ids"], batch_idx))
        loss = self._objective(batch["input_ids"], batch_idx)
        # Looked at once per optimizer step: asking here would make the host wait for every micro-batch.
        self._losses_finite = self._losses_finite & loss.detach().isfinite()
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True)
        return loss

    def _objective(self, input_ids: Tensor, batch_idx: int) -> Tensor:
        """Mean over predicted tokens of cross-entropy, divergence from the dense model, or both, in nats."""
        dense = self._dense_logits(input_ids) if self.distillation else None
        self.prepare_step(batch_idx)
        logits, count = next_token_logits(self.model, input_ids), input_ids[:, 1:].numel()
        if dense is None:
            return nll_sum(logits, input_ids) / count
        kl = kl_sum(logits, dense, input_ids) / count
        self.log("train/divergence", kl.detach(), sync_dist=True)
        if self.distillation == 1:
            return kl
        nll = nll_sum(logits, input_ids) / count
        return nll + self.distillation * (kl - nll)

    def _dense_logits(self, input_ids: Tensor) -> Tensor:
        with self.dense(), torch.no_grad():
            return next_token_logits(self.model, input_ids)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        check_step(
            self.trainer, self._losses_finite, self.named_parameters(), self.layers, self._forward_again
        )
        self._losses_finite = True
        self._tried.clear()

    def _forward_again(self) -> None:
        """The forward passes since the last optimizer step, on the same text with the same masks."""
        with torch.no_grad(), self.trainer.precision_plugin.train_step_context():
            for input_ids, batch_idx in self._tried:
                self.prepare_step(batch_idx)
                next_token_logits(self.model, input_ids)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # The loop frees them after the next forward pass, which would have to find room beside them.
        self.zero_grad()

    @override
    def on_validation_start(self) -> None:
        self._validation_masks = self.under_masks()
        self._validation_masks.__enter__()

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        nll, count = next_token_nll(self.model, batch["input_ids"])
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

    def settings(self) -> dict[str, object]:
        """What the method learns with, by the names of its options: plain values, and objects made with such."""
        optimizer = self.optimizer([nn.Parameter(torch.zeros(1))])
        names = ("distillation", "lr_end", "lr_schedule", "lr_warmup")
        return {"optimizer": optimizer} | {name: getattr(self, name) for name in names}

    def recipe(self) -> dict[str, object]:
        """What the learned mask depends on, by option; see `roi_lightning.recipe`."""
        settings: dict[str, object] = {
            "lm": self.source.spec,
            "revision": self.source.revision,
            "pattern": str(self.pattern),
            "dtype": self.dtype_name,
            "targets": self.targets,
            "ignore": self.ignore,
            **self.settings(),
        }
        flat = {
            key: entry
            for name, value in settings.items()
            for key, entry in options(f"model.{name}", value).items()
        }
        return {"model": type(self).__name__, "seed_everything": self.seed, **flat}

    def training_facts(self) -> dict[str, object]:
        """What an export tells about how its mask was learned; plain values."""
        settings = {name: spelled(value) for name, value in self.settings().items()}
        return {"learner": type(self).__name__, "method": self.method, "seed": self.seed, **settings}

    # Checkpoints.

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Only what is learned; the frozen language model is left out."""
        learned = self.learned_names()
        prefix = kwargs.get("prefix", "")
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name.removeprefix(prefix) in learned}

    def learned_names(self) -> set[str]:
        """Names of the learned parameters in the module's state dict."""
        return {f"lm.{name}.{layer.learned}" for name, layer in self.layers.items()}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        steps = self.trainer.max_steps
        mark_checkpoint(checkpoint, self.pattern, self.source.spec, self.run_recipe, steps)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.configure_model()
        check_belongs(checkpoint, self.pattern, self.state_dict())
        if self._trainer is not None and self.trainer.training:
            align_loops(checkpoint, self.trainer.accumulate_grad_batches)

    # The way out.

    def stored_weights(self) -> dict[str, str]:
        """Layer name → the name of its weight as stored on disk."""
        return stored_weights(self.source, self.model, self.layers)

    def packed_masks(self) -> dict[str, LayerMask]:
        """The hard masks by the names of their weights on disk; every rank has to ask, and gets all."""
        stored = self.stored_weights()
        return {
            stored[name]: LayerMask.from_bool(mask.cpu(), transposed=self.layers[name].dim == 0)
            for name, mask in self.hard_masks()
        }

    def mask_set(self, packed: Mapping[str, LayerMask] | None = None) -> MaskSet:
        """The hard masks of all layers, with the base model they belong to.

        Args:
            packed: From `packed_masks`, on a rank that alone goes on with them.
        """
        packed = self.packed_masks() if packed is None else packed
        if self._base is None:
            self._base = base_model(self.source, packed, self.stored_dtype, self.whole_lm)
        return MaskSet(pattern=self.pattern, layers=dict(packed), base=self._base)

    @property
    def whole_lm(self) -> PreTrainedModel | None:
        """The language model, if it is loaded and not spread over ranks."""
        return self.lm if self.device_mesh is None else None

    @property
    def stored_dtype(self) -> str:
        """The dtype in which a GGUF model is cast and saved."""
        return str(self.model.dtype).removeprefix("torch.")
