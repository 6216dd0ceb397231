"""The choice of one option for each layer, against enumeration."""

import itertools
import random

import pytest

from roi_lightning.errors import UserError
from roi_lightning.oneshot.allocation import allocate

WEIGHTS = (48, 48, 16, 96, 32)
SHARES = ((1, 4), (1, 2), (3, 4), (1, 1))


def problem(seed):
    """Layers of several sizes with options of 1:4, 2:4, 3:4 and dense; costs fall with what is kept, or do not."""
    chance = random.Random(seed)
    sizes = [[weights * n // m for n, m in SHARES] for weights in WEIGHTS]
    costs = [[*sorted((chance.expovariate(1) for _ in SHARES[1:]), reverse=True), 0.0] for _ in WEIGHTS]
    if seed % 2:
        chance.shuffle(costs[0])
        sizes[1], costs[1] = sizes[1][:2], costs[1][:2]  # an M that does not divide it
    return sizes, costs


def total(values, picks):
    return sum(options[pick] for options, pick in zip(values, picks, strict=True))


def cheapest(sizes, costs, budget):
    """The least cost of all combinations within the budget."""
    every = itertools.product(*(range(len(options)) for options in sizes))
    return min(total(costs, picks) for picks in every if total(sizes, picks) <= budget)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.25, 0.4, 0.5, 0.51, 0.77, 1.0, 2.0])
def test_the_choice_is_the_cheapest_of_all_combinations(seed, share):
    sizes, costs = problem(seed)
    budget = int(share * sum(WEIGHTS))
    picks = allocate(sizes, costs, budget)
    assert total(sizes, picks) <= budget
    assert total(costs, picks) == pytest.approx(cheapest(sizes, costs, budget))


@pytest.mark.parametrize("seed", range(6))
def test_sums_that_are_rounded_keep_to_the_budget_and_lose_little(seed):
    sizes, costs = problem(seed)
    budget = sum(WEIGHTS) // 2
    picks = allocate(sizes, costs, budget, max_units=40)
    assert total(sizes, picks) <= budget
    # The exact answer at a budget that is lower by the roundings.
    units = -(-(budget - sum(map(min, sizes))) // 40)
    lower = budget - units * len(WEIGHTS)
    assert total(costs, picks) <= cheapest(sizes, costs, lower) + 1e-12


def test_a_budget_below_the_smallest_choices_is_refused():
    sizes, costs = problem(0)
    least = sum(map(min, sizes))
    assert allocate(sizes, costs, least) == [0] * len(sizes)
    with pytest.raises(
        UserError, match=f"the sparsest choices keep {least} weights, and the budget is {least - 1}"
    ):
        allocate(sizes, costs, least - 1)
