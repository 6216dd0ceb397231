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
