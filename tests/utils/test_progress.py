"""Progress on pipes: what is written, when, and to which stream."""

import io
import re
import sys
import threading
from contextlib import redirect_stderr

import pytest

from roi_lightning.utils import progress as module
from roi_lightning.utils.progress import Lines, progress, working


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves, and no line due yet."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Lines, "_written", now[0])
    monkeypatch.setattr(Lines, "_worked", now[0])
    return now


def test_a_line_comes_when_none_was_written_for_ten_seconds_whatever_it_was_of(clock, capsys):
    for _ in progress([1, 2, 3], "first"):
        clock[0] += 4
    for _ in progress([1, 2, 3, 4], "second"):
        clock[0] += 6
    assert capsys.readouterr().err.splitlines() == [
        "first 3/3  4.00 s each  0:00:00 left",
        "second 2/4  6.00 s each  0:00:12 left",
        "second 4/4  6.00 s each  0:00:00 left",
    ]


def test_work_that_follows_on_silent_work_is_named_at_its_start(clock, capsys):
    for _ in progress("abc", "reading"):
        clock[0] += 3
    clock[0] += 3
    assert list(progress("ab", "hashing files")) == ["a", "b"]
    assert capsys.readouterr().err == "hashing files 0/2\n"


def test_what_is_worked_on_is_no_markup(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    with working("loading m[/x]"):
        pass
    assert "m[/x]" in stream.getvalue()


def test_work_in_one_piece_is_reported_until_it_ends(monkeypatch, capsys):
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.01)
    written = threading.Event()
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    stream.flush = written.set
    with working("loading a model"), redirect_stderr(io.StringIO()) as silenced:
        assert written.wait(30)
    count = len(stream.getvalue().splitlines())
    assert count
    assert not silenced.getvalue()
    assert all(re.fullmatch(r"loading a model  0:00:\d\d so far", x) for x in stream.getvalue().splitlines())
    assert not [thread for thread in threading.enumerate() if "report" in thread.name], "it has ended"
