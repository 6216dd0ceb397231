"""A short seeded form of `benchmarks/fuzz/`, and that it notices what it is there to notice."""

import sys
import time

import pytest

from benchmarks.fuzz import watch as fuzz_watch
from benchmarks.fuzz.configs import ConfigCases
from benchmarks.fuzz.masks import MaskCases
from benchmarks.fuzz.watch import Outcome, watch
from roi_lightning.errors import UserError


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        masks = MaskCases(folder)
        yield {"masks": masks, "configs": ConfigCases(folder, masks.model)}


@pytest.mark.filterwarnings("ignore")  # of libraries, about settings that make no sense
@pytest.mark.parametrize(
    ("name", "count"), [("masks", 300), pytest.param("configs", 12, marks=pytest.mark.slow)]
)
def test_no_finding(cases, name, count):
    outcomes = {seed: watch(cases[name], seed) for seed in range(count)}
    assert not {seed: outcome for seed, outcome in outcomes.items() if outcome.finding}
    assert {outcome.result for outcome in outcomes.values()} == {"accepted", "refused"}


def raises(error):
    def attempt():
        raise error

    return attempt


def says_and_exits(text, status):
    def attempt():
        sys.stderr.write(text)
        raise SystemExit(status)

    return attempt


ATTEMPTS = {
    "accepted": (lambda: None, False),
    "refused": (raises(UserError("pattern 5:4 is impossible")), False),
    "a parser's refusal": (says_and_exits("error: no such option\n", 2), False),
    "an exit without words": (says_and_exits("", 2), True),
    "another exception": (raises(KeyError("n")), True),
    "a hang": (lambda: time.sleep(60), True),
}


@pytest.mark.parametrize(("attempt", "is_finding"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_what_is_a_finding(monkeypatch, attempt, is_finding):
    monkeypatch.setattr(fuzz_watch, "SECONDS", 0.2)
    outcome = watch(lambda rng: ("kind", attempt), 0)
    assert isinstance(outcome, Outcome)
    assert bool(outcome.finding) == is_finding
