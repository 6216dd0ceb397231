"""Wanda: keep the largest products of weight and input norm."""

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.oneshot.method import CalibratedMethod, Pruned
from roi_lightning.oneshot.statistics import InputStatistics, SquareSums
from roi_lightning.pattern import NMPattern


class Wanda(CalibratedMethod):
    """The N largest |weight| × ‖input‖₂ of each group, the norm taken over all calibration tokens.

    Those lie in windows packed from documents end to end; the published code, and SparseGPT's, takes a random crop
    of each of 128 long documents.
    """

    @override
    def statistics(self, size: int, on: torch.device) -> InputStatistics:
        return SquareSums(size, on)

    @override
    def prune(
        self, weight: Tensor, statistics: InputStatistics | None, pattern: NMPattern, name: str
    ) -> Pruned:
        assert isinstance(statistics, SquareSums)
        return Pruned(pattern.top(weight.float().abs() * statistics.total.sqrt()))
