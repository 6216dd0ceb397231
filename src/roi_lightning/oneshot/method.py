"""What a one-shot method is: statistics of a layer's inputs in, a mask and perhaps new weights out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, device

from roi_lightning.oneshot.statistics import InputStatistics
from roi_lightning.pattern import NMPattern


@dataclass(frozen=True)
class Pruned:
    """What a method makes of one weight.

    Attributes:
        mask: Boolean, of the weight's shape; true is kept.
        weight: The weight with its survivors updated and zeros elsewhere, in its own dtype; None where the
            survivors stay as they are.
    """

    mask: Tensor
    weight: Tensor | None = None


class OneShotMethod(ABC):
    """Prunes one layer at a time."""

    def facts(self) -> dict[str, object]:
        """Its options, for those who read the result."""
        return {}

    @abstractmethod
    def prune(
        self, weight: Tensor, statistics: InputStatistics | None, pattern: NMPattern, name: str
    ) -> Pruned:
        """Choose what to keep.

        Args:
            weight: [out, in], any float dtype.
            statistics: Of the layer's inputs; None for methods that look at no activations.
            pattern: N:M along the inputs.
            name: The layer's, for messages.

        Raises:
            UserError: If the statistics can't be used.
        """


class CalibratedMethod(OneShotMethod):
    """A method that looks at the activations of some text."""

    @abstractmethod
    def statistics(self, size: int, on: device) -> InputStatistics:
        """An empty accumulator for a layer of `size` inputs."""
