"""The LightningModule that every method extends: frozen model, step and loss, optimizer, checkpoints, masks.

A method says what it learns for a tensor, which weight a training step computes with, and what the hard mask is;
everything else happens here, so that two methods differ in nothing but themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.data.packing import tokens_of
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.learning.compiling import Compile, Compiler
from roi_lightning.learning.fsdp import shard
from roi_lightning.learning.losses import next_token_nll, objective
from roi_lightning.learning.optim import (
    Decay,
    check_finite_so_far,
    check_finite_step,
    check_optimizer,
    check_trainer,
    decay_to,
    keep_configured,
)
from roi_lightning.learning.recipe import Recipe, arguments, options, run_recipe
from roi_lightning.learning.resume import align_loops, by_layer, check_belongs, mark_checkpoint
from roi_lightning.learning.student import PrunedTensor, pruned_tensors, student_of
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import LayerPatterns, Pattern, mixed_pattern
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import BaseTensors, open_base
from roi_lightning.models.config import GGUF_DTYPE, DType, NamedModel, compute_dtype, load_config
from roi_lightning.models.fingerprint import base_model, base_of
from roi_lightning.models.layers import ChosenLayers, Layer, choose_layers, stored_weights
from roi_lightning.models.loading import (
    enable_checkpointing,
    frozen_view,
    load_language_model,
    meta_language_model,
)
from roi_lightning.models.source import resolve_model
from roi_lightning.models.stored_tensors import tensor_sha256
from roi_lightning.utils.dtensor import distribute_like


class MaskLearningModule(pl.LightningModule, ABC):
    """Learns a mask over the linear layers of a frozen causal language model.

    A training step minimises the objective of the student, whose pruned tensors hold the weights of that step;
    validation is of the student under the hard masks.

    Until the models are built `teacher` and `student` are None; from then on `pattern` is by full names of layers.

    Args:
        lm: Hub id, directory, or GGUF file (`gguf:PATH`, or `smollm2-135m`); from Python also a loaded model.
        pattern: N:M, N kept of every M consecutive inputs; see `NMPattern` for what an integer means.
        patterns: Another N:M, or `dense`, for layers by name or glob: `{"*.down_proj": "4:8", "k_proj": dense}`.
            A full name wins over globs; the last matching glob wins over earlier ones.
        revision: Branch, tag or commit of a hub id.
        dtype: Number type of the frozen weights. `auto` takes the stored type (bfloat16 for GGUF), or float32 on CPUs
            without instructions for it. The learned parameters are always float32.
        targets: Names or globs of the linear layers to prune, or one.
        ignore: Names or globs of layers to leave dense.
        optimizer: Optimizer and its options; its `lr` is the learning rate at the start, after any warm-up.
        lr_end: Learning rate at the end of the run.
        lr_schedule: How the learning rate falls to `lr_end`: on a `cosine` (half a period) or `linear`.
        lr_warmup: Share of the run, below 1, over which the learning rate first rises from 0 on a straight line.
        distillation: Share of the loss, from 0 to 1, that compares next-token predictions with the dense model's. The
            rest is cross-entropy on the text, the paper's only term. Above 0 it costs one more forward pass per
            micro-batch.
        activation_checkpointing: Recompute activations in the backward pass to save memory.
        compile: `blocks` compiles the decoder blocks of both models and the loss before the first step; `auto` does
            so on a GPU that can. If compiling fails, the run says so and goes on without.
        attn_implementation: Attention of transformers: `sdpa`, `eager` or `flash_attention_2`.
        trust_remote_code: Let the model repository's own Python code run.
        seed: Seed of initial values and noise; on the command line `seed_everything` sets it.

    Raises:
        UserError: If `distillation` or `lr_warmup` is no such share, or `lr_end` is below 0.

    Attributes:
        learns: What the learned parameters are called where they are counted.
        differentiates: Whether a step has a backward pass.
        teacher: The frozen model.
        student: The same model with pruned tensors of its own; see `learning.student`.
        tensors: These, by name.
        learned: The parameters that are learned for them.
        compiler: Of the models.
        kept_of_prunable: How many weights the patterns keep, of how many; those of layers left dense are in both.
        dense_layers: The number of weights of each layer that its pattern leaves dense.
        prior_masks: From which the learned parameters started, by layer.
        run_recipe: Of the run, once it begins.
        loaded_step: The optimizer step of the checkpoint that was loaded, if any was.
    """

    learns: str = "parameters"
    differentiates: ClassVar[bool] = True
    CHECKPOINT_HYPER_PARAMS_KEY = "roi_options"  # for load_from_checkpoint, not for LightningCLI
    teacher: PreTrainedModel | None
    student: PreTrainedModel | None

    def __init__(
        self,
        lm: NamedModel,
        pattern: NMPattern | str | int = "2:4",
        patterns: Mapping[str, NMPattern | str | int] | None = None,
        revision: str | None = None,
        dtype: DType = "auto",
        targets: str | Sequence[str] = ("*",),
        ignore: str | Sequence[str] = (),
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_end: float = 1e-4,
        lr_schedule: Decay = "cosine",
        lr_warmup: float = 0.0,
        distillation: float = 0.0,
        activation_checkpointing: bool = False,
        compile: Compile = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= distillation <= 1:
            raise UserError(f"model.distillation is {distillation}; give a share of the loss, from 0 to 1")
        if not 0 <= lr_warmup < 1:
            raise UserError(
                f"model.lr_warmup is {lr_warmup}; give a share of the run, 0 or above and below 1"
            )
        self.pattern: Pattern = mixed_pattern(NMPattern(pattern), patterns or {})
        self._pattern_options: dict[str, object] = {"pattern": str(self.pattern)}
        if not isinstance(self.pattern, NMPattern):
            spelled = self.pattern.spelled().items()
            self._pattern_options = {"patterns": [f"{glob}: {own}" for glob, own in spelled]}
        self.dtype_name, self.seed = dtype, seed
        self.targets, self.ignore = ([x] if isinstance(x, str) else list(x) for x in (targets, ignore))
        self.optimizer, self.lr_end = optimizer, lr_end
        self.lr_schedule, self.lr_warmup = lr_schedule, lr_warmup
        check_at_least(self, "model.", lr_end=0)
        self.distillation, self.activation_checkpointing = distillation, activation_checkpointing
        self.attn_implementation, self.trust_remote_code = attn_implementation, trust_remote_code
        self.compiler = Compiler(compile)
        self.teacher = self.student = None
        self.tensors: dict[str, PrunedTensor] = {}
        self.learned = nn.ParameterList()
        # In a tuple, or torch would take it for a part of this module.
        self._in_memory: tuple[PreTrainedModel, ...] = ()
        if isinstance(lm, str):
            self.source = resolve_model(lm, revision)
        else:
            self._in_memory = (frozen_view(lm),)
            layers = choose_layers(type(lm).__name__, lm, self.pattern, self.targets, self.ignore).pruned
            self.source = base_of(lm, layers)
            if revision or attn_implementation or dtype != "auto":
                raise UserError(
                    "a loaded model takes no revision, dtype and attn_implementation; leave them out"
                )
        self.dense_layers: dict[str, int] = {}
        self.kept_of_prunable = (0, 0)
        self.prior_masks: dict[str, LayerMask] = {}
        self.run_recipe: Recipe = {}
        self.loaded_step = 0
        # Checkpoints hold what is learned; the frozen weights come from the model itself.
        self.strict_loading = False
        self._validated: int | None = None
        self._val_nll = MeanMetric()
        self._finite: Tensor | bool = True  # losses and gradients that nobody has asked about yet

    # What a method adds.

    @abstractmethod
    def shapes(self, shape: tuple[int, ...], pattern: NMPattern) -> dict[str, tuple[int, ...]]:
        """The shape of each kind of learned parameter, fp32, of a tensor.

        Args:
            shape: Of the tensor, or of the part of it that a rank has: [out, in], or [experts, out, in].
            pattern: Its pattern.
        """

    def begin(self, tensor: PrunedTensor) -> None:
        """Set the learned parameters of a tensor, which are zero, to their first values, this rank's part."""

    @abstractmethod
    def training_weight(self, tensor: PrunedTensor, **learned: Tensor) -> Tensor:
        """The weight that a training step computes with.

        Args:
            tensor: Which; its `dense` is the frozen weight.
            learned: Its parameters by kind, this rank's part.

        Returns:
            This rank's part, [..., out, in], differentiable in what is learned, as often as it is asked for.
        """

    @abstractmethod
    def hard_mask(self, tensor: PrunedTensor) -> Tensor:
        """The mask learned so far, boolean, of the whole tensor; every rank has to call it."""

    def hard_weight(self, tensor: PrunedTensor) -> Tensor:
        """The weight that the hard mask is measured on, masked: this rank's part; every rank has to call it."""
        return tensor.pruned(tensor.dense, self.hard_mask(tensor))

    def prepare_step(self, batch_idx: int) -> None:
        """Set up the training step of one micro-batch."""

    def choices(self, tensor: PrunedTensor) -> tuple[Tensor, int] | None:
        """What each group of a tensor chooses from, and how many of these it takes.

        `MaskMonitor` takes statistics of it.

        Returns:
            [..., choices], the highest first to be taken; None where nothing of the kind is learned.
        """
        return None

    @property
    @abstractmethod
    def method(self) -> str:
        """The method's short name in tables and files."""

    def annealing(self) -> dict[str, float]:
        """What the method's own schedules give for the current step, by tag, to be logged."""
        return {}

    def updates(self) -> dict[str, Tensor]:
        """The tensors that the method has changed, by their names on disk and as they are written there.

        On the CPU; every rank has to call it, and gets all.
        """
        return {}

    # Building.

    def choose(self, lm: PreTrainedModel) -> ChosenLayers:
        """The layers of a model that are learned on, and what becomes of the others; its shapes are enough.

        Raises:
            UserError: If globs match nothing, no layer remains, or M does not divide a layer.
        """
        return choose_layers(self.source.spec, lm, self.pattern, self.targets, self.ignore)

    def preflight(self, trainer: pl.Trainer) -> None:
        """Check all settings, and names and shapes on the meta device, before text or weights are read.

        Raises:
            UserError: For a setting that can't be used, an unreadable model, patterns that match nothing, or a
                layer M does not divide.
        """
        self.check_settings()
        tell_if_slow(self.dtype_name, trainer.strategy.root_device)
        if isinstance(trainer.strategy, ModelParallelStrategy):
            check_optimizer(self.optimizer, sharded=True)
        lm = meta_language_model(load_config(self.source, self.trust_remote_code), self.trust_remote_code)
        chosen = self.choose(lm)
        list(pruned_tensors(chosen.pruned, chosen.pattern, lm, lm))

    def check_settings(self) -> None:
        """Check what only shows when it is used.

        Raises:
            UserError: For an optimizer that can't be made, or a file that does not fit.
        """
        check_optimizer(self.optimizer)

    def load_lm(self) -> PreTrainedModel:
        """The model to learn on, frozen; override it to learn on one of your own."""
        if self._in_memory:
            return self._in_memory[0]
        if self.source.is_stored:
            open_base(self.source)  # what no mask can be applied to is refused before one is learned
        device = torch.device("cpu") if self._trainer is None else self.trainer.strategy.root_device
        return load_language_model(
            self.source, self.dtype_name, self.trust_remote_code, self.attn_implementation, device=device
        )

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.run_recipe = run_recipe(self, self.trainer, self.trainer.datamodule)  # type: ignore[attr-defined]

    @override
    def configure_model(self) -> None:
        if self.teacher is not None:
            return
        if self._trainer is not None:
            check_trainer(self.trainer)
        teacher = self.load_lm()
        chosen = self.choose(teacher)
        self.pattern, self.kept_of_prunable = chosen.pattern, (chosen.kept, chosen.prunable)
        self.dense_layers = {name: layer.numel for name, layer in chosen.dense.items()}
        pruned, mesh = {layer.parameter for layer in chosen.pruned.values()}, self.device_mesh
        student = student_of(teacher, pruned, alias=mesh is not None)
        if self.activation_checkpointing:
            enable_checkpointing(student)
        if mesh is not None:
            across = {layer.parameter for layer in chosen.pruned.values() if layer.transposed}
            shard([teacher, student], mesh, across)
        self.teacher, self.student = teacher, student
        found = pruned_tensors(chosen.pruned, self.pattern, teacher, student)
        self.tensors = {tensor.name: tensor for tensor in found}
        for tensor in self.tensors.values():
            self._learn_on(tensor)
        self.learned.extend(parameter for _, parameter in self.learned_parameters())
        for name in pruned:
            parameter = student.get_parameter(name)
            inside = [tensor for tensor in self.tensors.values() if tensor.student is parameter]
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, inside))
        own = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        models = ("teacher.", "student.")
        # DistributedDataParallel's own attribute: it reduces the gradients of what is learned alone.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in own if name.startswith(models)]
        learned = sum(parameter.numel() for parameter in self.learned)
        kept, prunable = self.kept_of_prunable
        share = f", mixed patterns: {kept:,} of {prunable:,} weights stay ({kept / prunable:.1%})"
        rank_zero_info(
            f"{self.source.spec}: {learned:,} parameters to learn on {len(chosen.pruned)} layers, {self.pattern}"
            f"{share if self.mixed_patterns else ''}"
        )

    def _learn_on(self, tensor: PrunedTensor) -> None:
        own = tensor.part(tensor.teacher)
        here = self.shapes(tuple(own.shape), tensor.pattern)
        for kind, whole in self.shapes(tensor.shape, tensor.pattern).items():
            start = torch.zeros(here[kind], dtype=torch.float32, device=own.device)
            tensor.learn(kind, start, whole)
        with torch.no_grad():
            self.begin(tensor)

    def learned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is learned, by the name in a checkpoint."""
        for name, tensor in self.tensors.items():
            for kind, parameter in tensor.learned.items():
                yield f"lm.{name}.{kind}", parameter

    def models(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Teacher and student, built if need be."""
        self.configure_model()
        assert self.teacher is not None
        assert self.student is not None
        return self.teacher, self.student

    # The step and its loss.

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        teacher, student = self.models()
        self.prepare_step(batch_idx)
        self.fill(self.draw)
        self.compiler.prepare((teacher, student), partial(self._attempt, batch))
        loss, divergence = self.objective(batch)
        # Looked at once per optimizer step: asking here would make the host wait for every micro-batch.
        self._finite = self._finite & loss.detach().isfinite()
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True)
        if divergence is not None:
            self.log("train/divergence", divergence.detach(), sync_dist=True)
        return loss

    def objective(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The loss under the weights that the student has now, and the divergence in it."""
        (teacher, student), (tokens, labels) = self.models(), tokens_of(batch)
        return objective(student, teacher, tokens, self.distillation, labels, self.compiler.compiled)

    def _attempt(self, batch: Mapping[str, Tensor]) -> None:
        """The passes of a step, for nothing."""
        try:
            loss, _ = self.objective(batch)
            if self.differentiates:
                loss.backward()
        finally:
            self.zero_grad()

    @torch.no_grad()
    def fill(self, fill: Callable[[PrunedTensor], None]) -> None:
        """Give the student other weights, tensor by tensor."""
        for tensor in self.tensors.values():
            fill(tensor)
        torch.clear_autocast_cache()  # where precision is mixed, of the weights before

    def draw(self, tensor: PrunedTensor) -> None:
        """Give the student the weight of a training step."""
        learned = {kind: tensor.here(kind) for kind in tensor.learned}
        tensor.write(self.training_weight(tensor, **learned))

    def _take_gradient(self, tensors: Sequence[PrunedTensor], parameter: Tensor) -> None:
        """Pass the gradient of one of the student's parameters on to what is learned in it, and free it."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        for tensor in tensors:
            self.collect(tensor, tensor.part(gradient).contiguous())

    def collect(self, tensor: PrunedTensor, gradient: Tensor) -> None:
        """Add to the gradients of what is learned by that of the weight of a training step, this rank's part."""
        learned = {kind: tensor.here(kind).detach().requires_grad_() for kind in tensor.learned}
        with torch.enable_grad():
            weight = self.training_weight(tensor, **learned)
        gradients = torch.autograd.grad(weight, list(learned.values()), gradient)
        for kind, own in zip(learned, gradients, strict=True):
            tensor.add_gradient(kind, own)

    @override
    def on_after_backward(self) -> None:
        if self.differentiates and isinstance(self.trainer.strategy, DDPStrategy):
            _Announce.apply(*self.learned).backward()  # type: ignore[no-untyped-call]

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._finite = check_finite_step(self.trainer, self._finite, self.learned_parameters())

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # The loop frees gradients only after the next forward pass, which needs that memory.
        self.zero_grad()

    @override
    def on_validation_start(self) -> None:
        self.harden()

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        nll, count = next_token_nll(self.models()[1], *tokens_of(batch))
        self._val_nll.update(nll / count, weight=count)

    @override
    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self._validated = self.trainer.global_step
        nll = self._val_nll.compute()
        self._val_nll.reset()
        self.log("val/nll", nll, sync_dist=True)
        self.log("val/perplexity", nll.exp(), prog_bar=True, sync_dist=True)

    # The optimizer.

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer, schedule = self._configured()
        # Fused AdamW can unscale gradients itself, and Lightning then refuses to clip them under mixed precision.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _configured(self) -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer, steps = self.optimizer(self.parameter_groups()), self.trainer.max_steps
        return optimizer, decay_to(optimizer, self.lr_end, steps, self.lr_schedule, self.lr_warmup)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What is learned, as an optimizer takes it; the first group has the optimizer's own learning rate."""
        return [{"params": list(self.learned)}]

    @override
    def on_fit_start(self) -> None:
        # Asked now, so that a model whose tensors go by other names on disk is refused before it is trained.
        _ = self.stored_weights
        for name in ("final_masks", "final_updates"):  # an earlier fit's
            self.__dict__.pop(name, None)

    @override
    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is not None:
            keep_configured(self.trainer, *self._configured())

    # Settings.

    def settings(self) -> dict[str, object]:
        """What the method learns with, by option: plain values, and objects made with such."""
        optimizer = self.optimizer([nn.Parameter(torch.zeros(1))])
        names = ("distillation", "lr_end", "lr_schedule", "lr_warmup")
        return {"optimizer": optimizer} | {name: getattr(self, name) for name in names}

    def _settings(self) -> dict[str, object]:
        return {
            "lm": self.source.spec + (" in memory" if self.source.kind == "memory" else ""),
            "revision": self.source.revision,
            **self._pattern_options,
            "dtype": self.dtype_name,
            "targets": self.targets,
            "ignore": self.ignore,
            **self.settings(),
        }

    def recipe(self) -> dict[str, object]:
        """What the learned mask depends on, by option; see `roi_lightning.learning.recipe`."""
        flat = {
            key: entry
            for name, value in self._settings().items()
            for key, entry in options(f"model.{name}", value).items()
        }
        return {"model": type(self).__name__, "seed_everything": self.seed, **flat}

    # Checkpoints.

    @override
    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Only what is learned; the frozen language model is left out."""
        return {prefix + name: parameter.detach() for name, parameter in self.learned_parameters()}

    @override
    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Take over what was learned, from a checkpoint that `on_load_checkpoint` found to fit."""
        for name, parameter in self.learned_parameters():
            value = state_dict[name]
            parameter.copy_(value if isinstance(value, DTensor) else distribute_like(value, parameter))
        return _IncompatibleKeys([], [])

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_finite_so_far(self.trainer, self._finite)
        mark_checkpoint(
            checkpoint,
            self.pattern,
            lm=self.source.spec,
            recipe=self.run_recipe,
            max_steps=self.trainer.max_steps,
            validated=self._validated,
        )
        made_with = arguments(self._settings()) | {"seed": self.seed} | by_layer(self.pattern)
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = made_with

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.configure_model()
        check_belongs(checkpoint, self.pattern, self.state_dict())
        self.loaded_step = checkpoint["global_step"]
        if self._trainer is not None and self.trainer.training:
            align_loops(checkpoint, self.trainer.accumulate_grad_batches)

    # Masks.

    def hard_masks(self) -> Iterator[tuple[str, LayerMask]]:
        """The hard masks of all layers by name; every rank has to ask, and gets all."""
        for tensor in self.tensors.values():
            for name, layer, mask in tensor.matrices(self.hard_mask(tensor).cpu()):
                yield name, LayerMask.from_rows(mask, layer.transposed)

    def harden(self, masks: Mapping[str, LayerMask] | None = None) -> PreTrainedModel:
        """Give the student pruned weights, which it keeps until the next training step.

        Args:
            masks: By layer, for the frozen weights; if None, its own hard weights.

        Returns:
            The student; every rank has to call it.
        """
        _, student = self.models()

        def fill(tensor: PrunedTensor) -> None:
            weight = (
                self.hard_weight(tensor) if masks is None else tensor.pruned(tensor.dense, tensor.mask(masks))
            )
            tensor.write(weight)

        self.fill(fill)
        return student

    @cached_property
    def stored_weights(self) -> dict[str, str]:
        """Layer name → the name of its weight as stored on disk."""
        return stored_weights(self.source, self.models()[0], self.layers)

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers that are learned on, by name."""
        return {name: layer for tensor in self.tensors.values() for name, layer in tensor.layers.items()}

    def packed_masks(self) -> dict[str, LayerMask]:
        """The hard masks by the names of their weights on disk; every rank has to call it, and gets all."""
        stored = self.stored_weights
        return {stored[name]: mask for name, mask in self.hard_masks()}

    def as_stored(
        self, weight: Callable[[PrunedTensor], Tensor], dtype: Callable[[str], torch.dtype]
    ) -> dict[str, Tensor]:
        """Weights as they are stored, by their names on disk: on the CPU; every rank has to call it.

        Args:
            weight: That of a tensor, this rank's part.
            dtype: That of a tensor on disk.
        """
        found = {}
        for tensor in self.tensors.values():
            for name, layer, own in tensor.matrices(tensor.gathered(weight(tensor)).cpu()):
                stored = self.stored_weights[name]
                oriented = own.T if layer.transposed else own
                found[stored] = oriented.to(dtype(stored)).contiguous()
        return found

    @cached_property
    def final_masks(self) -> dict[str, LayerMask]:
        """`packed_masks` at the end of a run, made once for all that write them."""
        return self.packed_masks()

    @cached_property
    def final_updates(self) -> dict[str, Tensor]:
        """`updates` at the end of a run, likewise."""
        return self.updates()

    @cached_property
    def magnitude_masks(self) -> dict[str, LayerMask]:
        """The magnitude mask of the frozen weights by layer name; every rank has to ask, and gets all."""
        from roi_lightning.oneshot import Magnitude, prune_layers

        layers = self.layers
        pruned = prune_layers(self.models()[0], layers, Magnitude(), self.pattern)
        return {name: LayerMask.from_rows(x.mask, layers[name].transposed) for name, x in pruned}

    @property
    def prior_name(self) -> str | None:
        """What the prior is called in tables; None where there is none."""
        return "prior" if self.prior_masks else None

    def mask_set(
        self,
        packed: Mapping[str, LayerMask] | None = None,
        updates: Mapping[str, Tensor] | None = None,
    ) -> MaskSet:
        """The hard masks of all layers, with the base model they belong to.

        Args:
            packed: From `packed_masks`, on a rank that uses them alone.
            updates: From `updates`: the weights that these masks go with.
        """
        updated = {name: tensor_sha256(tensor) for name, tensor in (updates or {}).items()}
        packed = self.packed_masks() if packed is None else packed
        pattern, dense = self.pattern, {}
        if isinstance(pattern, LayerPatterns):
            kept_dense = stored_weights(self.source, self.models()[0], self.dense_layers)
            pattern = pattern.renamed(self.stored_weights | kept_dense)
            dense = {kept_dense[name]: weights for name, weights in self.dense_layers.items()}
        return MaskSet(pattern, dict(packed), base_model(self.base, packed), updated, dense)

    @cached_property
    def base(self) -> BaseTensors:
        """The frozen model's tensors as stored; none is hashed twice."""
        whole = self.teacher if self.device_mesh is None else None
        return open_base(self.source, GGUF_DTYPE if self.dtype_name == "auto" else self.dtype_name, whole)

    @property
    def mixed_patterns(self) -> dict[str, dict[str, int]]:
        """Of mixed patterns how many weights stay, and of how many, for records and tables; else nothing."""
        kept, prunable = self.kept_of_prunable
        mixed = isinstance(self.pattern, LayerPatterns)
        return {"mixed_patterns": {"kept": kept, "prunable": prunable}} if mixed else {}


class _Announce(torch.autograd.Function):
    """Has DistributedDataParallel reduce gradients that are there already: its hooks run where autograd ends."""

    @staticmethod
    def forward(ctx: Any, *learned: Tensor) -> Tensor:
        return learned[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def tell_if_slow(dtype: str | torch.dtype, device: torch.device | None) -> None:
    """Say so where a CPU is slow at the dtype of frozen weights: a model's own, or an option's value."""
    name = str(dtype).removeprefix("torch.")
    held = getattr(torch, name, None)  # none is `auto`, which looks itself
    if device and held and compute_dtype(held, device) != held:
        remedy = "--model.dtype auto" if isinstance(dtype, str) else "a model loaded with dtype=torch.float32"
        rank_zero_info(f"this CPU is slow at {name}: {remedy} learns much faster here, in twice the memory")
