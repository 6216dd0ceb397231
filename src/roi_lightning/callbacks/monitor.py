"""What the mask is doing: scalars, histograms and images in TensorBoard."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from typing_extensions import override

from roi_lightning.callbacks.mask_statistics import (
    logit_sample,
    mask_tile,
    normalised_entropy,
    settled_groups,
    shown_layers,
)
from roi_lightning.errors import UserError
from roi_lightning.masks import LayerMask
from roi_lightning.module import RoILightningModule
from roi_lightning.overlap import kind_of


class MaskMonitor(Callback):
    """Looks at the masks every few optimizer steps.

    Scalars `mask/entropy` (of the pick distribution softmax(φ/λ), 1 is undecided), `mask/settled` (share of
    groups whose hard mask a redraw would change at the border with less than 1 % probability), `mask/flips`
    and `mask/flips_from_prior` (share of kept weights that were not kept at the previous look, and by the
    prior), `anneal/tau`, `anneal/lambda`, `lr`, `tokens/seen`, `tokens/per_second` (validation and looks
    apart); histograms of the logits by kind of layer; the top-left 8×8 corner of the mask of three kinds of
    layer in the first, middle and last block. Entropy, settled groups and histograms are taken on at most
    `sample` weights of each layer, flips on all.

    Args:
        every_n_steps: Optimizer steps between looks.
        sample: Weights per layer that statistics are taken on.

    Raises:
        UserError: If a number is below 1.
    """

    def __init__(self, every_n_steps: int = 50, sample: int = 16384) -> None:
        if every_n_steps < 1 or sample < 1:
            raise UserError(f"MaskMonitor needs positive numbers, got {every_n_steps=} and {sample=}")
        self.every_n_steps, self.sample = every_n_steps, sample
        self._previous: dict[str, LayerMask] = {}
        self._looked = -1
        self._timed_from = self._validation_started = 0.0
        self._timed_steps = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, RoILightningModule)
        self._look(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_started = time.monotonic()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timed_from += time.monotonic() - self._validation_started

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, RoILightningModule)
        step = trainer.global_step
        if step == self._looked or (step % self.every_n_steps and step != trainer.max_steps):
            return
        tokens = batch["input_ids"].numel() * trainer.world_size * trainer.accumulate_grad_batches
        self._look(trainer, pl_module, tokens)

    def _look(self, trainer: Trainer, module: RoILightningModule, tokens_per_step: int | None = None) -> None:
        step = trainer.global_step
        scalars = self._annealing(trainer, module) | self._mask_scalars(module, step, trainer.max_steps)
        if tokens_per_step is not None:
            seconds = time.monotonic() - self._timed_from
            rate = (step - self._timed_steps) * tokens_per_step / max(seconds, 1e-9)
            scalars |= {"tokens/seen": float(step * tokens_per_step), "tokens/per_second": rate}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step)
            if isinstance(logger, TensorBoardLogger):
                self._pictures(logger, module, step)
        self._looked, self._timed_steps, self._timed_from = step, step, time.monotonic()

    def _annealing(self, trainer: Trainer, module: RoILightningModule) -> dict[str, float]:
        step, total = trainer.global_step, trainer.max_steps
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        return {
            "anneal/tau": module.tau.at(step, total),
            "anneal/lambda": module.lam.at(step, total),
            "lr": rate,
        }

    def _mask_scalars(self, module: RoILightningModule, step: int, total: int) -> dict[str, float]:
        lam = module.lam.at(step, total)
        samples = [logit_sample(layer, self.sample) for layer in module.layers.values()]
        now = {
            name: LayerMask.from_bool(mask.cpu(), transposed=module.layers[name].dim == 0)
            for name, mask in module.hard_masks()
        }
        scalars = {
            "mask/entropy": _mean([normalised_entropy(sample, lam) for sample in samples]),
            "mask/settled": _mean([settled_groups(sample, module.pattern.n, lam) for sample in samples]),
        }
        for tag, before in (("mask/flips", self._previous), ("mask/flips_from_prior", module.prior_masks)):
            if before:
                scalars[tag] = _changed(before, now)
        self._previous = now
        return scalars

    def _pictures(self, logger: TensorBoardLogger, module: RoILightningModule, step: int) -> None:
        by_kind: dict[str, list[Tensor]] = {}
        for name, layer in module.layers.items():
            by_kind.setdefault(kind_of(name), []).append(logit_sample(layer, self.sample).flatten().cpu())
        for kind, logits in by_kind.items():
            logger.experiment.add_histogram(f"logits/{kind}", torch.cat(logits), step)
        for name in shown_layers(list(module.layers)):
            logger.experiment.add_image(f"mask/{name}", mask_tile(self._previous[name]), step)


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())


def _changed(before: Mapping[str, LayerMask], now: Mapping[str, LayerMask]) -> float:
    kept = sum(mask.kept for mask in now.values())
    return 1 - sum(mask.kept_with(before[name]) for name, mask in now.items()) / kept
