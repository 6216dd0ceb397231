"""The choice among several ways to multiply, against the times it was made from."""

import random

import pytest

from roi_lightning.runtime.choice import choose


def line(start, slope):
    return lambda rows: start + slope * rows


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ({"a": line(1, 1)}, {1: "a", 10_000: "a"}),
        ({"a": line(1, 1), "b": line(10.5, 0.5)}, {1: "a", 18: "a", 20: "b", 5000: "b"}),
        (
            {"a": line(0, 1), "b": line(100, 0.1), "c": line(40, 0.4)},
            {1: "a", 60: "a", 80: "c", 190: "c", 210: "b"},
        ),
    ],
)
def test_the_quickest_is_taken_everywhere(ways, expected):
    counts = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    choice = choose({rows: {name: way(rows) for name, way in ways.items()} for rows in counts})
    assert {rows: choice.way(rows) for rows in expected} == expected
    for rows in range(1, 600):  # straight lines are known exactly, whatever was measured
        assert ways[choice.way(rows)](rows) <= min(way(rows) for way in ways.values()) * (1 + 1e-9)


def test_measured_numbers_of_rows_get_the_quickest_of_any_times():
    generator = random.Random(0)
    for _ in range(200):
        counts = sorted(generator.sample(range(1, 100), generator.randint(1, 8)))
        times = {rows: {name: generator.random() for name in "abc"} for rows in counts}
        choice = choose(times)
        assert list(choice.starts) == sorted(set(choice.starts))
        for rows in counts:
            assert times[rows][choice.way(rows)] == min(times[rows].values())


def test_a_way_ends_where_it_cannot_go():
    few, many = line(1, 0.01), line(50, 0.01)
    choice = choose(
        {1: {"few": few(1), "many": many(1)}, 8: {"few": few(8), "many": many(8)}, 16: {"many": many(16)}}
    )
    assert [choice.way(rows) for rows in (1, 8, 9, 16, 99)] == ["few", "few", "many", "many", "many"]


def test_a_way_begins_where_it_can_go():
    choice = choose({1: {"one": 1.0}, 4: {"one": 9.0, "other": 2.0}})
    assert [choice.way(rows) for rows in (1, 3, 4)] == ["one", "one", "other"]
