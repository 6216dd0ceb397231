"""The division of columns into groups, against every division there is and slow sums."""

import itertools
import statistics

import pytest
import torch

from helpers.lab import brute_top
from roi_lightning.contrib.permute.grouping import group_columns, kept_score
from roi_lightning.masks.pattern import NMPattern


def scores_of(seed, rows=6, columns=8):
    """Squares, as different between columns as inputs are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(columns, generator=generator).mul(1.5).exp()
    return (torch.randn(rows, columns, generator=generator) * sizes).square()


def brute_kept(scores, n, m):
    return float(scores[brute_top(scores, n, m)].double().sum())


def lost_at_2_4(scores):
    """The sum of the two smallest of every four."""
    return float(scores.view(len(scores), -1, 4).sort(-1).values[..., :2].sum())


def all_divisions():
    """The 35 ways to make two groups of eight columns."""
    for rest in itertools.combinations(range(1, 8), 3):
        yield [0, *rest, *(i for i in range(1, 8) if i not in rest)]


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "1:4", "4:8"])
def test_the_kept_score_is_the_sum_of_the_largest_of_each_group(pattern):
    rule, scores = NMPattern(pattern), scores_of(3, columns=16)
    assert kept_score(scores, rule) == pytest.approx(brute_kept(scores, rule.n, rule.m))


def test_of_eight_columns_the_division_is_mostly_the_best_of_all():
    rule, ratios = NMPattern("2:4"), []
    for seed in range(30):
        scores = scores_of(seed)
        every = [lost_at_2_4(scores[:, order]) for order in all_divisions()]
        lost = lost_at_2_4(scores[:, group_columns(scores, rule)])
        assert min(every) * (1 - 1e-5) <= lost < statistics.median(every)
        ratios.append(lost / min(every))
    assert sum(ratio < 1 + 1e-5 for ratio in ratios) >= 20
    assert statistics.mean(ratios) < 1.02


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "4:8", "2:8"])
def test_the_order_is_a_permutation_that_keeps_more(pattern):
    rule, scores = NMPattern(pattern), scores_of(1, rows=40, columns=64)
    order = group_columns(scores, rule)
    assert torch.equal(order.sort().values, torch.arange(64))
    before, after = (brute_kept(x, rule.n, rule.m) for x in (scores, scores[:, order]))
    assert after > before + 0.1 * (float(scores.sum()) - before)
    assert torch.equal(group_columns(scores, rule), order), "not the same every time"


def with_zeros(scores):
    """As behind a ReLU that half of the channels never pass."""
    return scores * (torch.arange(scores.shape[1]) % 2)


@pytest.mark.parametrize(
    "scores",
    [
        torch.zeros(4, 8),
        torch.ones(4, 16),
        torch.eye(16),
        with_zeros(scores_of(5, columns=32)),
        scores_of(2, columns=4),
        # The best division there is: two large columns in each group.
        torch.tensor([1.0, 2, 0, 0]).repeat(5, 4),
    ],
)
def test_the_order_is_never_worse_than_the_columns_as_they_are(scores):
    rule = NMPattern("2:4")
    order = group_columns(scores, rule)
    assert torch.equal(order.sort().values, torch.arange(scores.shape[1]))
    assert brute_kept(scores[:, order], 2, 4) >= brute_kept(scores, 2, 4)
