"""Choose a pattern for each layer so that the sum of costs is least and a total of kept weights is not exceeded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern

Choice = NMPattern | None
# Sums that are told apart; finer ones are rounded up, so that the budget is kept all the same.
_MAX_UNITS: Final = 100_000


@dataclass(frozen=True)
class LayerChoices:
    """A layer to choose for.

    Attributes:
        weights: How many it has.
        choices: What it may have; None is dense.
    """

    weights: int
    choices: Sequence[Choice]

    def kept(self, choice: Choice) -> int:
        """How many weights stay."""
        return self.weights if choice is None else self.weights // choice.m * choice.n


def choose(
    layers: Mapping[str, LayerChoices], costs: Mapping[str, Mapping[Choice, float]], budget: int
) -> dict[str, Choice]:
    """One choice for each layer.

    Args:
        layers: By name.
        costs: Of their choices.
        budget: How many weights may stay in total.

    Raises:
        UserError: If even the sparsest choices keep more.
    """
    sizes = [[layer.kept(choice) for choice in layer.choices] for layer in layers.values()]
    prices = [[costs[name][choice] for choice in layer.choices] for name, layer in layers.items()]
    picks = allocate(sizes, prices, budget)
    return {name: layer.choices[pick] for (name, layer), pick in zip(layers.items(), picks, strict=True)}


def allocate(
    sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int, max_units: int = _MAX_UNITS
) -> list[int]:
    """Solve a multiple-choice knapsack by dynamic programming.

    Args:
        sizes: Of each layer's options, 0 or above.
        costs: Of the same options.
        budget: What the sizes of the chosen options may add up to.
        max_units: Sums of sizes that are told apart. The answer is exact where there are no more, counted in the
            sizes' greatest common divisor; else it may leave a part of the budget below layers ÷ `max_units` unused.

    Returns:
        The index of each layer's option.

    Raises:
        UserError: If even the smallest options exceed the budget.
    """
    least = [min(options) for options in sizes]
    spare = budget - sum(least)
    if spare < 0:
        raise UserError(
            f"the sparsest choices keep {sum(least):,} weights, and the budget is {budget:,}; raise the budget or "
            "add sparser choices"
        )
    extra = [[size - low for size in options] for options, low in zip(sizes, least, strict=True)]
    unit = max(math.gcd(*(size for options in extra for size in options)), 1)
    unit *= max(math.ceil(spare / unit / max_units), 1)
    steps = [[math.ceil(size / unit) for size in options] for options in extra]
    best, picks = np.zeros(spare // unit + 1), []
    for own_steps, own_costs in zip(steps, costs, strict=True):
        totals = np.stack(
            [_shifted(best, step) + cost for step, cost in zip(own_steps, own_costs, strict=True)]
        )
        picks.append(totals.argmin(0).astype(np.int8))
        best = totals.min(0)
    chosen, left = [], len(best) - 1
    for own_steps, own_picks in zip(reversed(steps), reversed(picks), strict=True):
        chosen.append(int(own_picks[left]))
        left -= own_steps[chosen[-1]]
    return chosen[::-1]


def _shifted(
    best: "np.ndarray[tuple[int], np.dtype[np.float64]]", step: int
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The least cost of the layers before, by what is left for all once this one has taken its step."""
    taken = np.full_like(best, np.inf)
    taken[step:] = best[: max(len(best) - step, 0)]
    return taken
