"""Learn masks for a model in memory."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data import CalibrationDataModule, Corpus
from roi_lightning.errors import UserError
from roi_lightning.learning.base import MaskLearningModule, tell_if_slow
from roi_lightning.learning.callbacks import MaskMonitor
from roi_lightning.learning.callbacks.progress import with_progress
from roi_lightning.learning.optim import check_trainer
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.learning.trainer import RoITrainer
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.loading import frozen_view
from roi_lightning.samplers import GumbelTopK, Sampler
from roi_lightning.samplers.schedules import Linear, Schedule
from roi_lightning.utils.third_party import plain_errors, silence_warnings

_T = TypeVar("_T")
Made = type[_T] | partial[_T]  # what makes one
# With what `overlays/small_budget.yaml` starts.
_START: Final = {"prior_strength": 0.015, "init_std": 0.003}
_TRAINER: Final = {
    "max_epochs": 1,
    "gradient_clip_val": 1.0,
    "log_every_n_steps": 1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def learn(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpora: str | Sequence[Corpus | str] = "python-docs",
    *,
    pattern: str = "2:4",
    patterns: Mapping[str, str] | None = None,
    steps: int = 150,
    seq_len: int = 1024,
    batch_size: int = 1,
    windows_per_step: int = 4,
    learning_rate: float = 1e-3,
    prior: str = "activation",
    sampler: Sampler | str = GumbelTopK(),  # noqa: B008 - frozen
    tau: Schedule | float | str = Linear(0.2, 0.05),  # noqa: B008 - frozen
    lam: Schedule | float | str = Linear(0.005, 0.002),  # noqa: B008 - frozen
    distillation: float = 0.5,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    seed: int = 0,
    learner: Made[MaskLearningModule] = RoILightningModule,
    data: Made[CalibrationDataModule] = CalibrationDataModule,
    log_dir: Path | str | None = None,
    **trainer: Any,
) -> MaskSet:
    """Learn masks, by RoI or another learner, with the data and the trainer of the command `fit`.

    The defaults are those of `overlays/small_budget.yaml`, for a few hundred thousand tokens. All of the text is
    learned from, nothing is written except to `log_dir`, and the model stays as it is.

    Args:
        lm: Any causal language model, all of it on one device.
        tokenizer: The model's tokenizer.
        corpora: Text: files, globs, hub ids, `python-docs`, or `Corpus` objects.
        pattern: N:M, N kept of every M consecutive inputs.
        patterns: Another N:M, or `dense`, for layers by name or glob.
        steps: Optimizer steps.
        seq_len: Tokens of a window.
        batch_size: Windows of a micro-batch.
        windows_per_step: Windows of an optimizer step, a multiple of `batch_size`.
        learning_rate: AdamW's at the start; it falls on a cosine to a tenth.
        prior: Where logits start, see `RoILightningModule`.
        sampler: How RoI draws masks.
        tau: RoI's softmax temperature by optimizer step.
        lam: RoI's sampling temperature by optimizer step.
        distillation: Share of the loss that is the divergence from the dense model.
        targets: Glob patterns of the layers to prune.
        ignore: Glob patterns of layers to leave dense.
        seed: Seed of the initial logits, the draws and the order of the text.
        learner: A `MaskLearningModule`; with options of its own as `partial(MyLearner, strength=0.2)`, which win over
            the ones above.
        data: The class that reads the corpora, given in the same way.
        log_dir: A folder for TensorBoard; None for no log.
        trainer: Options of Lightning's Trainer: `accelerator`, `precision`, `callbacks`.

    Returns:
        The masks; see the package for what they belong to.

    Raises:
        UserError: For whatever can't be learned, or learned on; before text is read where that can be known.
    """
    own = _options_of_roi(learner, {"prior": prior}, {"sampler": sampler, "tau": tau, "lam": lam})
    adamw = partial(torch.optim.AdamW, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    chosen: dict[str, Any] = {"pattern": pattern, "patterns": patterns, "targets": targets, "ignore": ignore}
    chosen |= {"distillation": distillation, "optimizer": adamw, "lr_end": learning_rate / 10, "seed": seed}
    with _session(log_dir) as folder:
        fitter = _trainer(steps, log_dir, {"default_root_dir": str(folder)} | trainer)
        tell_if_slow(frozen_view(lm).dtype, fitter.strategy.root_device)
        module = _make(learner, lm, chosen | own)
        if getattr(module, "lr_weights", None) is not None:
            raise UserError(
                "learn returns masks, and lr_weights trains weights, too; leave it out, or save the model and run fit"
            )
        module.check_settings()
        windows = {"seq_len": seq_len, "batch_size": batch_size, "windows_per_step": windows_per_step}
        # None of the text is held out.
        text = {"corpora": corpora, "val_corpora": corpora, "seed": seed, **windows}
        reader = _make(data, tokenizer, text)
        reader.check_model(module.source.spec, lm.config)
        fitter.fit(module, datamodule=reader)
        return module.mask_set()


def _make(kind: Made[_T], source: object, options: dict[str, Any]) -> _T:
    """An object of a class, or of a partial one, whose own options win."""
    own = kind.keywords if isinstance(kind, partial) else {}
    make: Callable[..., _T] = kind
    return make(source, **options | own)


def _options_of_roi(
    learner: Made[MaskLearningModule], prior: dict[str, Any], drawing: dict[str, Any]
) -> dict[str, Any]:
    """What only RoI and what extends it have options for; refused to the rest unless it was left out."""
    kind = learner.func if isinstance(learner, partial) else learner
    taken: dict[str, Any] = {}
    if isinstance(kind, type) and issubclass(kind, RoILightningModule):
        taken = prior if kind.fixed_options else _START | prior | drawing
    defaults = signature(learn).parameters
    for name, value in (prior | drawing).items():
        if name not in taken and value != defaults[name].default:
            raise UserError(
                f"{name} is an option of RoILightningModule and means nothing to {kind.__name__}; leave it out, or "
                "give the learner options of its own by functools.partial"
            )
    return taken


def _trainer(steps: int, log_dir: Path | str | None, options: dict[str, Any]) -> RoITrainer:
    callbacks = list(options.pop("callbacks", None) or [])
    settings: dict[str, Any] = _TRAINER | {"max_steps": steps}
    if log_dir is not None:
        settings["logger"] = TensorBoardLogger(log_dir, name="", version="", default_hp_metric=False)
        callbacks.append(MaskMonitor())
    if options.get("enable_progress_bar", True):
        callbacks = with_progress(callbacks)
    with plain_errors():
        trainer = RoITrainer(**settings | options, callbacks=callbacks)
    check_trainer(trainer)
    if trainer.world_size > 1:
        raise UserError(
            f"learn runs on one device, not {trainer.world_size}: give devices=1, or save the model and run fit"
        )
    return trainer


@contextmanager
def _session(log_dir: Path | str | None) -> Iterator[Path]:
    """A folder for what the trainer writes, which is gone with the block unless it was asked for."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        silence_warnings()
        yield Path(folder if log_dir is None else log_dir)
