"""Keep the largest weights."""

from torch import Tensor
from typing_extensions import override

from roi_lightning.oneshot.method import OneShotMethod, Pruned
from roi_lightning.oneshot.statistics import InputStatistics
from roi_lightning.pattern import NMPattern


class Magnitude(OneShotMethod):
    """The N largest absolute weights of each group; reads no text."""

    @override
    def prune(
        self, weight: Tensor, statistics: InputStatistics | None, pattern: NMPattern, name: str
    ) -> Pruned:
        return Pruned(pattern.top(weight.float().abs()))
