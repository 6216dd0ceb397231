"""Recovery whose mask is chosen anew on the way, to be compared with one whose mask stays.

    python -m roi_lightning fit --config recover.yaml --model benchmarks.refresh.RefreshModule --lm EXPORT …

Pruned weights are trained, too: from zero, by the gradients that they would have if they were kept, though the
forward pass leaves them out. Every so many steps each group keeps the N of largest magnitude. Checkpoints don't
hold the mask, so that a run can't be resumed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from roi_lightning.learning.recover import KeptLinear, RecoveryModule
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.samplers.masked_linear import attach


class RefreshedLinear(KeptLinear):
    """A layer that trains all of its weights and computes with those that its mask keeps."""

    @override
    def drawn_weight(self) -> Tensor:
        pruned = self.kept.detach().masked_fill(self.hard_mask(), 0)
        return (self.kept - pruned).to(self.weight.dtype)

    @override
    def zero_pruned_(self, tensor: Tensor) -> None:
        """Leave it as it is: pruned weights are trained."""

    @torch.no_grad()
    def refresh(self) -> int:
        """Keep the N of largest magnitude of every group.

        Returns:
            How many weights are kept that were not.
        """
        before = self.hard_mask()
        mask = self.pattern.top(self.kept.abs())
        self.mask_bits.copy_(LayerMask.from_rows(mask).packed)
        return int((mask & ~before).sum())

    @override
    def as_stored(self, dtype: torch.dtype) -> Tensor:
        self.kept.data.masked_fill_(~self.hard_mask(), 0)
        return super().as_stored(dtype)


class RefreshModule(RecoveryModule):
    """Recovery with a mask that is chosen anew.

    Args:
        lm: As in `RecoveryModule`.
        refresh_every: Optimizer steps from one choice to the next.
        kwargs: As in `RecoveryModule`.
    """

    layers: dict[str, RefreshedLinear]

    def __init__(self, lm: str, *, refresh_every: int = 10, **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        self.refresh_every = refresh_every

    @override
    def attach(self, lm: PreTrainedModel, layers: dict[str, nn.Linear | Conv1D]) -> dict[str, KeptLinear]:
        self.state.pattern = self.pattern
        return dict(attach(lm, layers, self.state, RefreshedLinear))

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.trainer.global_step % self.refresh_every == 0:
            self.log("train/moved", float(sum(layer.refresh() for layer in self.layers.values())))

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"refresh_every": self.refresh_every}
