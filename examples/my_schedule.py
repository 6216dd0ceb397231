"""A schedule of your own: a temperature on half a cosine.

    roi-lightning fit --config quickstart.yaml --model.tau my_schedule.Cosine --model.tau.end 0.1

A schedule says its value at every optimizer step; what it is made with are the options.
"""

import math
from dataclasses import dataclass

from typing_extensions import override

from roi_lightning.samplers.schedules import Schedule


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from `start` to `end`, which is reached at `fraction` of the run.

    Args:
        start: Value at step 0.
        end: Value at the end.
        fraction: Fraction of the run over which the value moves.
    """

    start: float = 1.0
    end: float = 0.05
    fraction: float = 0.75

    @override
    def at(self, step: int, total: int) -> float:
        progress = min(1.0, step / (self.fraction * total))
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * progress)) / 2
