"""Temperatures as functions of the optimizer step (the paper's Equation 13, its linear ablation, MaskLLM's).

Annealing ends at a fraction of the run, never at a step number, so that a shorter run anneals as fully as a
long one. Steps are optimizer steps, not batches.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from roi_lightning.errors import UserError


class Schedule(ABC):
    """A value that changes with the optimizer step."""

    @abstractmethod
    def at(self, step: int, total: int) -> float:
        """The value at a step.

        Args:
            step: Optimizer steps already taken, from 0.
            total: Optimizer steps of the whole run.
        """


@dataclass(frozen=True)
class Annealing(Schedule):
    """A value that moves from `start` to `end` over `fraction` of the run and stays there.

    Args:
        start: Value at step 0, above 0.
        end: Value from step T on, above 0.
        fraction: Fraction of the run over which the value moves, in (0, 1]; 0.75 in the paper.
    """

    start: float = 1.0
    end: float = 0.05
    fraction: float = 0.75

    def __post_init__(self) -> None:
        _check(self.start, self.end)
        if not 0 < self.fraction <= 1:
            raise UserError(
                f"fraction is {self.fraction}; set it to the fraction of the run that anneals, in (0, 1]"
            )

    @override
    def at(self, step: int, total: int) -> float:
        return self._between(min(1.0, step / max(1.0, self.fraction * total)))

    @abstractmethod
    def _between(self, progress: float) -> float:
        """The value after a share of the way, from 0 to 1."""


@dataclass(frozen=True)
class Exponential(Annealing):
    """Geometric decay: `max(end, start * (end / start) ** (step / T))`, T = `fraction` of the run."""

    @override
    def _between(self, progress: float) -> float:
        return self.end if progress >= 1 else self.start * (self.end / self.start) ** progress


@dataclass(frozen=True)
class Linear(Annealing):
    """Straight line from `start` to `end` over `fraction` of the run, constant afterwards."""

    @override
    def _between(self, progress: float) -> float:
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class LinearScale(Annealing):
    """One over a straight line: λ = 1/κ while the scale κ of the logits grows from `start` to `end` (MaskLLM)."""

    start: float = 100.0
    end: float = 500.0
    fraction: float = 1.0

    @override
    def _between(self, progress: float) -> float:
        return 1 / (self.start + (self.end - self.start) * progress)


@dataclass(frozen=True)
class Constant(Schedule):
    """The same value throughout.

    Args:
        value: Above 0.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        _check(self.value, self.value)

    @override
    def at(self, step: int, total: int) -> float:
        return self.value


def _check(start: float, end: float) -> None:
    if not (0 < start < math.inf and 0 < end < math.inf):
        raise UserError(f"a temperature must be a positive number, got start {start} and end {end}")
