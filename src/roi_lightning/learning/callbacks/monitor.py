"""Log how the mask changes: scalars, histograms and pictures."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import check_at_least
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.overlap import RUN_DEPTHS, kind_of, shown_layers
from roi_lightning.utils.devices import peak_memory

# The difference of two Gumbel variables is logistic: beyond this lead, a redraw swaps two with under 1 %.
_SETTLED_LEAD: Final = 4.6
_TILE: Final = 8
_PIXELS: Final = 24
# What TensorBoard's table of hyperparameters shows beside them: the last value of this scalar.
_RESULT: Final = "val/perplexity"


class MaskMonitor(Callback):
    """Logs a snapshot of the masks every few optimizer steps, and the settings of the run when it starts.

    Scalars `mask/flips` and `mask/flips_from_prior` (fraction of kept weights that were not kept in the
    previous snapshot, and by the prior), the learner's own annealing (`anneal/tau`, `anneal/lambda`), `lr`,
    `tokens/seen`, `tokens/per_second` (without validation and snapshots), `memory/peak_gib` (most memory of this
    process so far: of its GPU, or of the CPU); the top-left 8×8 corner of the mask of three kinds of layer in the
    first, middle and last block, to TensorBoard and W&B. Where it is learned what groups choose from
    (`MaskLearningModule.choices`, the logits of RoI and MaskLLM), also histograms of that by kind of layer,
    `mask/entropy` (of the distribution of a pick, softmax(φ/λ), 1 is undecided), and `mask/settled` (fraction
    of groups whose hard mask a redraw would change at the border with less than 1 % probability). A pick is
    of an element of a group in RoI, of a candidate mask in MaskLLM. Entropy, settled groups and histograms
    are of at most `sample` logits of each layer, flips of all weights.

    Args:
        every_n_steps: Optimizer steps between snapshots.
        sample: Number of logits per layer that the statistics are computed from.

    Raises:
        UserError: If a number is below 1.
    """

    def __init__(self, every_n_steps: int = 50, sample: int = 16384) -> None:
        self.every_n_steps, self.sample = every_n_steps, sample
        check_at_least(self, "MaskMonitor.", every_n_steps=1, sample=1)
        self._previous: dict[str, LayerMask] = {}
        self._logged = -1
        self._timed_from = self._validation_started = 0.0
        self._timed_steps = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        log_hyperparameters(trainer.loggers, pl_module.run_recipe)
        self._log(trainer, pl_module)

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
        assert isinstance(pl_module, MaskLearningModule)
        step = trainer.global_step
        if step == self._logged or (step % self.every_n_steps and step != trainer.max_steps):
            return
        tokens = batch["input_ids"].numel() * trainer.world_size * trainer.accumulate_grad_batches
        self._log(trainer, pl_module, tokens)

    def _log(self, trainer: Trainer, module: MaskLearningModule, tokens_per_step: int | None = None) -> None:
        step = trainer.global_step
        scalars = module.annealing() | self._flips(module)
        scalars["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        scalars["memory/peak_gib"] = peak_memory(trainer.strategy.root_device) / 2**30
        samples = self._samples(module)
        if samples:
            lam = scalars.get("anneal/lambda", 1.0)
            scalars["mask/entropy"] = _mean([normalised_entropy(x, lam) for x, _ in samples.values()])
            scalars["mask/settled"] = _mean([settled_groups(x, n, lam) for x, n in samples.values()])
        if tokens_per_step is not None:
            seconds = time.monotonic() - self._timed_from
            rate = (step - self._timed_steps) * tokens_per_step / max(seconds, 1e-9)
            scalars |= {"tokens/seen": float(step * tokens_per_step), "tokens/per_second": rate}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step)
        self._pictures(trainer.loggers, {name: sample for name, (sample, _) in samples.items()}, step)
        self._logged, self._timed_steps, self._timed_from = step, step, time.monotonic()

    def _samples(self, module: MaskLearningModule) -> dict[str, tuple[Tensor, int]]:
        """Some choices of every tensor that has any, [groups, choices], and how many of these a group takes."""
        found = ((name, module.choices(tensor)) for name, tensor in module.tensors.items())
        return {name: (_sampled(x[0], self.sample), x[1]) for name, x in found if x is not None}

    def _flips(self, module: MaskLearningModule) -> dict[str, float]:
        now = dict(module.hard_masks())
        earlier = {"mask/flips": self._previous, "mask/flips_from_prior": module.prior_masks}
        self._previous = now
        return {tag: _changed(before, now) for tag, before in earlier.items() if before}

    def _pictures(self, loggers: Iterable[Logger], samples: Mapping[str, Tensor], step: int) -> None:
        by_kind: dict[str, list[Tensor]] = {}
        for name, sample in samples.items():
            by_kind.setdefault(kind_of(name), []).append(sample.flatten().cpu())
        for kind, logits in by_kind.items():
            log_histogram(loggers, f"logits/{kind}", torch.cat(logits), step)
        for name in shown_layers(list(self._previous), RUN_DEPTHS):
            log_picture(loggers, f"mask/{name}", mask_tile(self._previous[name]), step)


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())


def _changed(before: Mapping[str, LayerMask], now: Mapping[str, LayerMask]) -> float:
    kept = sum(mask.kept for mask in now.values())
    return 1 - sum(mask.kept_with(before[name]) for name, mask in now.items()) / kept


def _sampled(groups: Tensor, count: int) -> Tensor:
    """Evenly spaced groups of a layer's [rows, ..., choices]: [groups, choices], about `count` elements."""
    rows = groups.shape[0]
    stride = max(1, groups.numel() // count)
    return groups[:: min(stride, rows)].flatten(0, -2)[: max(1, count // groups.shape[-1])]


def normalised_entropy(logits: Tensor, lam: float) -> Tensor:
    """Mean entropy of softmax(φ/λ) over groups of logits [groups, choices]: from 0 to 1, where all are as likely."""
    log_p = (logits / lam).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy.mean() / torch.tensor(float(logits.shape[-1]), device=logits.device).log()


def settled_groups(logits: Tensor, picks: int, lam: float) -> Tensor:
    """Fraction of groups, [groups, choices], whose last choice taken leads the next by more than noise bridges."""
    ordered = (logits / lam).sort(-1, descending=True).values
    return (ordered[:, picks - 1] - ordered[:, picks] > _SETTLED_LEAD).float().mean()


def mask_tile(mask: LayerMask) -> Tensor:
    """The top-left 8×8 corner of a mask, kept weights dark, grid lines between; uint8 [1, height, width]."""
    corner = mask.to_rows()[:_TILE, :_TILE]
    picture = torch.where(corner, 40, 225).to(torch.uint8)
    picture = picture.repeat_interleave(_PIXELS, 0).repeat_interleave(_PIXELS, 1)
    picture[::_PIXELS], picture[:, ::_PIXELS] = 150, 150
    return picture.unsqueeze(0)


@rank_zero_only
def log_histogram(loggers: Iterable[Logger], tag: str, values: Tensor, step: int) -> None:
    """Log the distribution of the values of a tensor on a CPU to TensorBoard and W&B."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(tag, values, step)
        elif isinstance(logger, WandbLogger):
            import wandb

            logger.log_metrics({tag: wandb.Histogram(values.float().numpy())}, step)


@rank_zero_only
def log_picture(loggers: Iterable[Logger], tag: str, picture: Tensor, step: int) -> None:
    """Log grey values, uint8 [1, height, width], to TensorBoard and W&B."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, picture, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [picture[0].numpy()], step)


@rank_zero_only
def log_hyperparameters(loggers: Iterable[Logger], settings: Mapping[str, Any]) -> None:
    """Log the settings of a run; TensorBoard's table shows the last held-out perplexity beside them."""
    for logger in loggers:
        logger.log_hyperparams(dict(settings))
        if isinstance(logger, TensorBoardLogger):
            _fill_table(logger, settings)


def _fill_table(logger: TensorBoardLogger, settings: Mapping[str, Any]) -> None:
    from torch.utils.tensorboard.summary import hparams

    # Lightning has written this file by now, before there was anything to say.
    save_hparams_to_yaml(str(Path(logger.log_dir) / logger.NAME_HPARAMS_FILE), logger.hparams)
    shown = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in settings.items()}
    for summary in hparams(shown, {_RESULT: 0.0}):
        logger.experiment.file_writer.add_summary(summary)
