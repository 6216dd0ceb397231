"""Where logits start: at random values that are moved towards the mask of a prior.

A prior is given one layer at a time, so that no more than one boolean mask is alive at once.
"""

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError, check_at_least, user_path
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.student import PrunedTensor
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.fingerprint import check_masks_fit
from roi_lightning.samplers import Sampler
from roi_lightning.samplers.noise import noise_key
from roi_lightning.utils.dtensor import distribute_like, from_first_rank

if TYPE_CHECKING:
    from roi_lightning.oneshot import OneShotMethod
    from roi_lightning.oneshot.settings import Activations


NAMED_PRIORS: Final = ("none", "magnitude", "activation", "wanda", "sparsegpt")
MEASURED_PRIORS: Final = NAMED_PRIORS[2:]  # on text
SEQUENTIAL_PRIORS: Final = NAMED_PRIORS[3:]  # a block on what the pruned ones before it give
_DRAWN: Final = 1 << 20  # logits, for an error of a tenth of a percent at 2:4


@cache
def one_shot_priors() -> dict[str, tuple["OneShotMethod", "Activations"]]:
    """The methods of the named priors.

    They give masks alone: the weights to learn on are the base's, so later blocks receive what those give too.
    """
    from roi_lightning.oneshot import Magnitude, SparseGPT, Wanda

    return {
        "magnitude": (Magnitude(), "dense"),
        "activation": (Wanda(), "dense"),
        "wanda": (Wanda(), "sequential"),
        "sparsegpt": (SparseGPT(update_weights=False), "sequential"),
    }


@dataclass(frozen=True)
class LogitStart:
    """The options of a start; see `RoILightningModule`, whose they are.

    Raises:
        UserError: If one can't be used.
    """

    init_std: float
    prior: str
    prior_strength: float
    prior_margin: float
    prior_windows: int

    def __post_init__(self) -> None:
        check_at_least(self, "model.", init_std=0, prior_strength=0, prior_margin=0, prior_windows=1)
        if self.prior not in NAMED_PRIORS and not user_path(self.prior).exists():
            raise UserError(
                f"model.prior {self.prior!r} is none of {', '.join(NAMED_PRIORS)} and no mask file is there; "
                "choose one"
            )
        if self.prior_margin and self.prior == "none":
            raise UserError(
                f"model.prior_margin is {self.prior_margin}, and there is no prior to lean to; choose a model.prior"
            )

    @property
    def name(self) -> str:
        """What the prior is called in tables."""
        return self.prior if self.prior in NAMED_PRIORS else "prior"

    def settings(self) -> dict[str, object]:
        """The options that the learned mask depends on."""
        start: dict[str, object] = {"init_std": self.init_std, "prior": self.prior}
        if self.prior == "none":
            return start
        measured = {"prior_windows": self.prior_windows} if self.prior in MEASURED_PRIORS else {}
        margin = {"prior_margin": self.prior_margin} if self.prior_margin else {}
        return start | {"prior_strength": self.prior_strength} | margin | measured

    def check_strategy(self, trainer: Trainer, spec: str, pattern: Pattern) -> None:
        """Refuse a prior that a sharded model can't be measured for.

        Raises:
            UserError: Saying how to make the prior first.
        """
        if self.prior in SEQUENTIAL_PRIORS and isinstance(trainer.strategy, ModelParallelStrategy):
            raise UserError(
                f"model.prior {self.prior!r} goes through the layers one by one, which a sharded model "
                f"does not allow; make the mask first (roi-lightning prune {spec} "
                f"--method {self.prior} {_pattern_options(pattern)} --corpora FILES --out DIR) and set "
                "model.prior to DIR"
            )

    def warn_if_weak(self, sampler: Sampler, pattern: Pattern, lam: float, remedy: str) -> None:
        """Warn of first draws that are nearer to chance than to the prior.

        Args:
            sampler: Whose logits they are.
            pattern: Of the run.
            lam: The sampling temperature λ of the first draws.
            remedy: What gives a prior more weight, in words.
        """
        if self.prior == "none":
            return
        for each in pattern.distinct:
            chance = each.n / each.m
            kept = share_kept_at_start(sampler, each, self.prior_strength, self.init_std, lam)
            where = f" at {each}" if len(pattern.distinct) > 1 else ""
            if kept < (1 + chance) / 2:
                rank_zero_warn(
                    f"the first draws keep {kept:.1%} of what the prior {self.prior!r} keeps{where} ({chance:.1%} "
                    f"would be chance): model.prior_strength {self.prior_strength} is little beside λ = {lam:g} at "
                    f"the start; {remedy}"
                )

    def initialise(self, module: MaskLearningModule, sampler: Sampler) -> None:
        """Set the logits of all tensors; never done again when a run resumes.

        All ranks start from the first one's: sums that round differently would tell measured priors apart.

        Args:
            module: Built, about to fit.
            sampler: Its own.

        Raises:
            UserError: If a prior's mask file does not fit the model.
        """
        sharded = module.device_mesh is not None
        measured = self.prior in MEASURED_PRIORS
        if self.prior != "none":
            module.prior_masks = dict(from_first_rank(self._masks(module), all_make=sharded or not measured))
        for tensor in module.tensors.values():
            logits = tensor.learned["logits"]
            mask = tensor.mask(module.prior_masks) if module.prior_masks else None
            start = self._random(module.seed, tensor)
            own = sampler.initial_logits(start, mask, self.prior_strength, tensor.pattern)
            with torch.no_grad():
                logits.copy_(distribute_like(own, logits))
            if dist.is_initialized() and not sharded:
                dist.broadcast(logits.detach(), src=0)

    def _random(self, seed: int, tensor: PrunedTensor) -> Tensor:
        # Drawn on the CPU, so that every device starts from the same values.
        generator = torch.Generator().manual_seed(noise_key(seed, -1, tensor.name)[0] & 0xFFFFFFFF)
        return torch.randn(tensor.learned["logits"].shape, generator=generator).mul_(self.init_std)

    def _masks(self, module: MaskLearningModule) -> Iterator[tuple[str, LayerMask]]:
        if self.prior not in NAMED_PRIORS:
            yield from self._file_masks(module)
            return
        from roi_lightning.oneshot import Calibration, prune_layers

        method, activations = one_shot_priors()[self.prior]
        calibration = None
        if self.prior in MEASURED_PRIORS:
            calibration = Calibration(self._text(module.trainer), activations, module.device)
        teacher, layers = module.models()[0], module.layers
        for name, result in prune_layers(teacher, layers, method, module.pattern, calibration):
            yield name, LayerMask.from_rows(result.mask, layers[name].transposed)

    def _file_masks(self, module: MaskLearningModule) -> Iterator[tuple[str, LayerMask]]:
        masks = MaskSet.load(user_path(self.prior))
        check_masks_fit(module.source, masks)
        for name, stored in module.stored_weights.items():
            if stored not in masks.layers:
                raise UserError(f"the prior's mask file has no mask for {stored!r}; leave it out (ignore)")
            own, wanted = masks.pattern.of(stored), module.pattern.of(name)
            if own != wanted:
                raise UserError(
                    f"the prior's mask file has {stored!r} at {own} and the run at {wanted}; give the patterns it "
                    "was made with or another mask"
                )
            yield name, masks.layers[stored]

    def _text(self, trainer: Trainer) -> Tensor:
        """The first training windows."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, CalibrationDataModule):
            raise UserError(
                f"model.prior {self.prior!r} reads text from a CalibrationDataModule; pass one to fit"
            )
        windows = data.windows("train", self.prior_windows)
        rank_zero_info(f"prior: {self.prior} on {windows.numel():,} tokens")
        return windows


def _pattern_options(pattern: Pattern) -> str:
    """What gives a command the patterns."""
    if isinstance(pattern, NMPattern):
        return f"--pattern {pattern}"
    return f"--patterns {shlex.quote(json.dumps(pattern.spelled()))}"


def share_kept_at_start(
    sampler: Sampler, pattern: NMPattern, strength: float, init_std: float, lam: float
) -> float:
    """How much of a prior the first draws keep, from 0 to 1: by hard draws of random groups, the same every time.

    Args:
        sampler: Whose logits start from the prior.
        pattern: The N:M pattern.
        strength: How far kept and pruned weights are pushed apart.
        init_std: Of the logits' random part.
        lam: The sampling temperature λ at the start.
    """
    generator = torch.Generator().manual_seed(0)
    groups = max(1, _DRAWN // math.prod(sampler.logits_shape((1, pattern.m), pattern)))
    prior = (torch.arange(pattern.m) < pattern.n).expand(groups, -1)
    noise = torch.randn(sampler.logits_shape((groups, pattern.m), pattern), generator=generator)
    logits = sampler.initial_logits(noise * init_std, prior, strength, pattern)
    gumbel = -torch.rand(logits.shape, generator=generator).log_().neg_().log_()
    drawn = sampler.hard_mask(logits / lam + gumbel, pattern)
    return float((drawn & prior).sum() / prior.sum())
