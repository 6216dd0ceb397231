"""What learners of logits have in common: layers with logits, a sampler, and a prior from which the logits start."""

import json
import math
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.priors import (
    MEASURED_PRIORS,
    NAMED_PRIORS,
    ONE_SHOT_PRIORS,
    SEQUENTIAL_PRIORS,
    check_prior,
    check_prior_pattern,
    file_masks,
    share_kept_at_start,
)
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.fingerprint import check_masks_fit
from roi_lightning.oneshot import Calibration, prune_layers
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear
from roi_lightning.samplers.noise import noise_key
from roi_lightning.utils.dtensor import copy_from_first_rank, distribute_like, from_first_rank


def _pattern_options(pattern: Pattern) -> str:
    """What gives a command the patterns."""
    if isinstance(pattern, NMPattern):
        return f"--pattern {pattern}"
    return f"--patterns {shlex.quote(json.dumps(pattern.spelled()))}"


class LogitLearningModule(MaskLearningModule):
    """Learns logits, from which masks are drawn, from a prior or from random ones.

    Args:
        init_std: Standard deviation of the random logits at the start, N(0, 0.01) in RoI's paper.
        prior: Where the logits start besides: `none`, `magnitude`, `activation` (Wanda's score on the dense
            model's activations, one pass), `wanda` or `sparsegpt` (layer after layer, see `oneshot`; the weights
            stay the base's), a mask file, or an exported directory.
        prior_strength: Added to the logits of weights the prior keeps and taken from the others.
        prior_margin: Added likewise when the mask is hardened, so that a weight takes the place of one that the prior
            keeps only if it leads by more than twice this. It plays no part in training.
        prior_windows: Training windows on which `activation`, `wanda` and `sparsegpt` are measured.
        kwargs: As in `MaskLearningModule`.

    Attributes:
        stronger_prior: What gives a prior more weight in the first draws, in words.
    """

    learns = "logits"
    stronger_prior: ClassVar[str] = "raise model.prior_strength"
    layers: Mapping[str, SparseLinear]
    state: SharedState

    def __init__(
        self,
        lm: str,
        *,
        init_std: float = 0.01,
        prior: str = "none",
        prior_strength: float = 0.015,
        prior_margin: float = 0.0,
        prior_windows: int = 24,
        **kwargs: Any,
    ) -> None:
        super().__init__(lm, **kwargs)
        numbers = {"init_std": init_std, "prior_strength": prior_strength, "prior_margin": prior_margin}
        for name, value in numbers.items():
            if not 0 <= value < math.inf:
                raise UserError(f"model.{name} is {value}; set it to a number, 0 or above")
        if prior_windows < 1:
            raise UserError(f"model.prior_windows is {prior_windows}; it must be at least 1")
        check_prior(prior)
        if prior_margin and prior == "none":
            raise UserError(
                f"model.prior_margin is {prior_margin}, and there is no prior to lean to; choose a model.prior"
            )
        self.init_std, self.prior = init_std, prior
        self.prior_strength, self.prior_windows = prior_strength, prior_windows
        self.prior_margin = prior_margin

    @property
    @abstractmethod
    def first_lam(self) -> float:
        """The sampling temperature λ of the first draws."""

    @override
    def preflight(self, trainer: pl.Trainer) -> None:
        if self.prior in SEQUENTIAL_PRIORS and isinstance(trainer.strategy, ModelParallelStrategy):
            raise UserError(
                f"model.prior {self.prior!r} goes through the layers one by one, which a sharded model "
                f"does not allow; make the mask first (roi-lightning prune {self.source.spec} "
                f"--method {self.prior} {_pattern_options(self.pattern)} --corpora FILES --out DIR) and set "
                "model.prior to DIR"
            )
        super().preflight(trainer)

    @override
    def check_settings(self) -> None:
        super().check_settings()
        if self.prior not in NAMED_PRIORS:
            check_prior_pattern(MaskSet.load(Path(self.prior).expanduser()), self.pattern)

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.trainer.ckpt_path is None:
            self._warn_of_weak_prior()
            self.initialise_logits()

    def _warn_of_weak_prior(self) -> None:
        if self.prior == "none":
            return
        lam, start = self.first_lam, (self.prior_strength, self.init_std)
        for pattern in self.pattern.distinct:
            chance = pattern.n / pattern.m
            kept = share_kept_at_start(self.state.sampler, pattern, *start, lam)
            where = f" at {pattern}" if len(self.pattern.distinct) > 1 else ""
            # Nearer to chance than to the prior.
            if kept < (1 + chance) / 2:
                rank_zero_warn(
                    f"the first draws keep {kept:.1%} of what the prior {self.prior!r} keeps{where} ({chance:.1%} "
                    f"would be chance): model.prior_strength {self.prior_strength} is little beside λ = {lam:g} at "
                    f"the start; {self.stronger_prior}"
                )

    def initialise_logits(self) -> None:
        """Random logits, moved towards the prior; never done again when a run resumes.

        All ranks start from the first one's: sums that round differently would tell measured priors apart.

        Raises:
            UserError: If a prior's mask file does not fit the model.
        """
        sharded = self.device_mesh is not None
        measured = self.prior in MEASURED_PRIORS
        for name, prior in from_first_rank(self._packed_prior(), all_make=sharded or not measured):
            layer = self.layers[name]
            mask = None if prior is None else prior.to_rows().to(layer.logits.device)
            start = self._random_logits(name, layer.logits)
            logits = self.state.sampler.initial_logits(start, mask, self.prior_strength, layer.pattern)
            with torch.no_grad():
                layer.logits.copy_(distribute_like(logits, layer.logits))
            if not sharded:
                copy_from_first_rank(layer.logits.detach())
            if prior is not None:
                self._keep_prior(name, prior)

    def _keep_prior(self, name: str, prior: LayerMask) -> None:
        self.prior_masks[name] = prior
        self.layers[name].prior, self.layers[name].prior_margin = prior, self.prior_margin

    def _packed_prior(self) -> Iterator[tuple[str, LayerMask | None]]:
        if self.prior == "none":
            yield from ((name, None) for name in self.layers)
            return
        for name, mask in self._prior():
            yield name, self.layers[name].packed(mask)

    def _random_logits(self, name: str, like: Tensor) -> Tensor:
        # Drawn on the CPU, so that every device starts from the same values.
        generator = torch.Generator().manual_seed(noise_key(self.seed, -1, name)[0] & 0xFFFFFFFF)
        return torch.randn(like.shape, generator=generator).mul_(self.init_std).to(like.device)

    def _prior(self) -> Iterator[tuple[str, Tensor]]:
        if self.prior in ONE_SHOT_PRIORS:
            return self._one_shot_prior()
        masks = MaskSet.load(Path(self.prior).expanduser())
        check_masks_fit(self.source, masks)
        return file_masks(masks, self.stored_weights, self.pattern)

    def _one_shot_prior(self) -> Iterator[tuple[str, Tensor]]:
        """The masks of a one-shot method, by the first training windows if it reads text."""
        method, activations = ONE_SHOT_PRIORS[self.prior]
        calibration = None
        if self.prior in MEASURED_PRIORS:
            calibration = Calibration(self._prior_text(), activations, self.device)
        with self.dense():
            for name, result in prune_layers(self.model, self.layers, method, self.pattern, calibration):
                yield name, result.mask

    def _prior_text(self) -> Tensor:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, CalibrationDataModule):
            raise UserError(
                f"model.prior {self.prior!r} reads text from a CalibrationDataModule; pass one to fit"
            )
        windows = data.windows("train", self.prior_windows)
        rank_zero_info(f"prior: {self.prior} on {windows.numel():,} tokens")
        return windows

    @override
    def settings(self) -> dict[str, object]:
        settings = super().settings() | {"init_std": self.init_std, "prior": self.prior}
        if self.prior == "none":
            return settings
        measured = {"prior_windows": self.prior_windows} if self.prior in MEASURED_PRIORS else {}
        margin = {"prior_margin": self.prior_margin} if self.prior_margin else {}
        return settings | {"prior_strength": self.prior_strength} | margin | measured

    # Checkpoints.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["prior_masks"] = {name: mask.packed for name, mask in self.prior_masks.items()}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        for name, packed in checkpoint["prior_masks"].items():
            outputs, inputs = self.layers[name].weight.shape
            prior = LayerMask(packed.cpu(), (outputs, inputs), self.layers[name].transposed)
            self._keep_prior(name, prior)
