import math
from itertools import pairwise

import pytest

from roi_lightning.errors import UserError
from roi_lightning.samplers.schedules import Constant, Exponential, Linear, LinearScale

RANGES = [(1.0, 0.05, 0.75), (1.0, 0.002, 0.75), (4.0, 0.05, 1.0), (0.005, 0.002, 0.3)]


@pytest.mark.parametrize("total", [4, 100, 2000])
@pytest.mark.parametrize(("start", "end", "fraction"), RANGES)
def test_exponential_is_the_papers_formula(start, end, fraction, total):
    schedule = Exponential(start, end, fraction)
    annealed = fraction * total
    for step in range(total + 1):
        expected = max(end, start * math.exp(math.log(end / start) * step / annealed))
        assert schedule.at(step, total) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("total", [4, 400])
@pytest.mark.parametrize(("start", "end", "fraction"), [*RANGES, (0.1, 10.0, 0.5)])
def test_linear_is_a_line_then_flat(start, end, fraction, total):
    schedule = Linear(start, end, fraction)
    values = [schedule.at(step, total) for step in range(total + 1)]
    turn = math.floor(fraction * total)
    slopes = [b - a for a, b in pairwise(values)]
    assert slopes[:turn] == pytest.approx([(end - start) / (fraction * total)] * turn, rel=1e-6)
    assert values[turn + 1 :] == pytest.approx([end] * (total - turn))


@pytest.mark.parametrize("total", [7, 100, 2000])
@pytest.mark.parametrize(("start", "end", "fraction"), [(100, 500, 1.0), (1e4, 10, 0.5)])
def test_scale_is_one_over_a_line_and_no_line_itself(start, end, fraction, total):
    lam, kappa = LinearScale(start, end, fraction), Linear(start, end, fraction)
    for step in range(total + 1):
        assert lam.at(step, total) * kappa.at(step, total) == pytest.approx(1, rel=1e-12)
    assert (lam.at(0, total), lam.at(total, total)) == pytest.approx((1 / start, 1 / end), rel=1e-12)
    assert lam.at(10**6, total) == lam.at(total, total)
    # Halfway, MaskLLM's λ is 1/300, where a line would be at 0.006.
    assert LinearScale().at(1000, 2000) == pytest.approx(1 / 300, rel=1e-12)
    assert LinearScale().at(50, 100) == LinearScale().at(1000, 2000)


@pytest.mark.parametrize("kind", [Exponential, Linear, LinearScale])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_refuses_impossible_temperatures(kind, bad):
    for values in ({"start": bad}, {"end": bad}):
        with pytest.raises(UserError, match=str(bad)):
            kind(**values)
    with pytest.raises(UserError, match=str(bad)):
        Constant(bad)


@pytest.mark.parametrize("kind", [Exponential, Linear, LinearScale])
@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, math.nan])
def test_refuses_impossible_fractions(kind, bad):
    with pytest.raises(UserError, match=rf"fraction.*{bad}"):
        kind(fraction=bad)
