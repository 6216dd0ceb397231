"""The curves of perplexity over tokens: known ones are found, and what noise hides is in the range."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks.token_curve import as_markdown, excesses, fit, fits, main, scatter

COUNTS = 51_200, 102_400, 102_400, 921_600, 1_536_000
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def curve(tokens, floor, exponent):
    return floor + (1 - floor) * (tokens / COUNTS[0]) ** -exponent


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_a_curve_is_found_again_by_its_floor(floor):
    points = [(tokens, curve(tokens, floor, 0.4)) for tokens in COUNTS]
    found = fit(points, floor)
    assert (found.exponent, found.error) == (pytest.approx(0.4), pytest.approx(0, abs=1e-12))
    assert found(2.1e9) == pytest.approx(curve(2.1e9, floor, 0.4))
    other = fit(points, floor + 0.1)
    assert other.error == pytest.approx(
        statistics.fmean((other(tokens) - y) ** 2 for tokens, y in points) ** 0.5
    )
    assert other.error > 1e-3


def test_without_noise_one_curve_is_left_and_with_it_the_true_one_is_among_them():
    generator, inside = np.random.default_rng(0), 0
    points = [(tokens, curve(tokens, 0.0, 0.2)) for tokens in COUNTS]
    assert [x.floor for x in fits(points, 0.0)] == [0.0]
    for _ in range(60):
        noisy = [(tokens, curve(tokens, 0.2, 0.2) + 0.02 * generator.standard_normal()) for tokens in COUNTS]
        at_the_budget = [x(2.1e9) for x in fits(noisy, 0.02)]
        inside += min(at_the_budget) <= curve(2.1e9, 0.2, 0.2) <= max(at_the_budget)
    assert inside >= 42


def test_scatter_is_the_standard_deviation_of_seeds():
    generator = np.random.default_rng(0)
    texts = {
        name: [
            (count, level + 0.02 * generator.standard_normal()) for count in range(300) for _ in range(seeds)
        ]
        for name, level, seeds in (("one", 1.0, 2), ("two", 3.0, 3), ("single", 2.0, 1))
    }
    assert scatter(texts) == pytest.approx(0.02, rel=0.05)
    with pytest.raises(ValueError, match="no two runs"):
        scatter({"single": texts["single"]})


def test_the_page_has_the_table_of_its_runs():
    texts = json.loads((RESULTS / "token_curve_2of4.json").read_text())["texts"]
    assert as_markdown(texts, [2.1e9]) in (RESULTS / "token_curve.md").read_text()
    text = excesses(texts)["WikiText-2"]
    dense = texts["WikiText-2"]["dense"]
    assert [dense * math.exp(y) for _, y in text] == pytest.approx(
        [y for _, y in texts["WikiText-2"]["runs"]]
    )


def test_the_command_prints_and_draws(tmp_path, capsys):
    main([str(RESULTS / "token_curve_2of4.json"), "--figure", str(tmp_path / "curve.png")])
    assert "| WikiText-2 |" in capsys.readouterr().out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
