"""The benchmark of interruptions, in short: a tiny run that is killed while it steps and while it exports."""

from pathlib import Path

import pytest

from benchmarks import survive
from helpers.lab import make_lab, run

lab = pytest.fixture(make_lab)


@pytest.mark.slow
def test_nothing_is_lost(lab, capsys, monkeypatch):
    command = ["--signal", "KILL", "--times", "2", "--steps", "80", "--pause", "0.05", "--work", "runs"]
    fit = ["--model.lm", str(lab.model), "--data.corpora", str(lab.corpus), "--data.seq_len", "32"]
    command += ["--json", "found.json", "--", *fit]
    # The run without interruption needs no process of its own.
    monkeypatch.setenv("ROI_SURVIVE_PHASE", "phase")
    assert run(*survive.fit_command(survive.build_parser().parse_args(command), Path("runs/whole"))) == 0
    assert survive.main(command) == 0
    assert "no file unreadable, no difference in the mask" in capsys.readouterr().out
