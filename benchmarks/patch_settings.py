"""Two settings of PATCH (Paramathic/patch) as learners, each the only change to RoI's recipe.

    roi-lightning fit --config recipes/million_tokens.yaml --model benchmarks.patch_settings.KeptRatio
    roi-lightning fit --config recipes/million_tokens.yaml --model benchmarks.patch_settings.AgreementPrior \\
        --model.prior WANDA --model.others '[MAGNITUDE, SPARSEGPT]'

Run from the project's folder. The three are directories that `prune` has written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning import RoILightningModule
from roi_lightning.learning.student import PrunedTensor
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.config import NamedModel


class KeptRatio(RoILightningModule):
    """Rewards the share of the norm that is kept, the sum of ‖drawn‖ over the sum of ‖dense‖ over all layers.

    Args:
        lm: As in `RoILightningModule`.
        ratio: What the share is multiplied by; it falls linearly to 0.
        kwargs: As in `RoILightningModule`.
    """

    def __init__(self, lm: NamedModel, *, ratio: float = 10.0, **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.ratio = ratio
        self._norms: dict[str, float] = {}
        self._total = 0.0
        self._share: Tensor | None = None

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self._total:
            self._total = sum(norm(tensor.dense) for tensor in self.tensors.values())
        self._norms = {name: norm(tensor.masked) for name, tensor in self.tensors.items()}
        self._share = torch.tensor(sum(self._norms.values()) / self._total, requires_grad=True)
        self.log("train/kept_ratio", self._share.detach())
        return loss - self.ratio * (1 - self.trainer.global_step / self.trainer.max_steps) * self._share

    @override
    def collect(self, tensor: PrunedTensor, gradient: Tensor) -> None:
        super().collect(tensor, gradient)
        assert self._share is not None
        assert self._share.grad is not None
        job = tensor.dense, tensor.here("logits"), tensor.pattern, self.draws[tensor.name]
        of_norm = self.current_sampler.logits_gradient(tensor.masked, *job)
        scale = float(self._share.grad) / (self._norms[tensor.name] * self._total)
        tensor.add_gradient("logits", of_norm.mul_(scale))


class AgreementPrior(RoILightningModule):
    """Starts logits at the prior's where other masks agree with it, and elsewhere without it.

    Args:
        lm: As in `RoILightningModule`.
        others: Directories with a mask each.
        kwargs: As in `RoILightningModule`.
    """

    def __init__(self, lm: NamedModel, *, others: Sequence[str], **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.others = list(others)

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        others = [MaskSet.load(Path(path)).layers for path in self.others]
        agreed = total = 0
        for tensor in self.tensors.values():
            prior = tensor.mask(self.prior_masks)
            masks = [
                tensor.mask({name: own[self.stored_weights[name]] for name in tensor.layers})
                for own in others
            ]
            agree = torch.stack([mask == prior for mask in masks]).all(0)
            agreed, total = agreed + int(agree.sum()), total + agree.numel()
            with torch.no_grad():
                tensor.learned["logits"].sub_((2.0 * prior - 1) * ~agree, alpha=self.start.prior_strength)
        print(f"the masks agree on {agreed / total:.2%} of the weights")


def norm(weight: Tensor) -> float:
    """The Frobenius norm."""
    return float(torch.linalg.vector_norm(weight, dtype=torch.float32))
