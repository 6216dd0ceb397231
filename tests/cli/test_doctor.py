"""`doctor` against what the machine itself says, and against machines that lack things."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers.lab import run
from roi_lightning.cli import doctor
from roi_lightning.utils import cpp_extension


@pytest.fixture
def _compiled_anew():
    cpp_extension.load.cache_clear()
    cpp_extension._version.cache_clear()
    yield
    cpp_extension.load.cache_clear()
    cpp_extension._version.cache_clear()


def test_the_table_and_the_json_say_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "2000")  # a line for a row
    assert run("doctor", "--json", tmp_path / "doctor.json") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    report = json.loads((tmp_path / "doctor.json").read_text())
    wanted = [[name, "✓" if row["ok"] else "!", row["found"], row["means"]] for name, row in report.items()]
    assert rows == wanted
    assert f"torch {version('torch')}, " in report["versions"]["found"]
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert float(report["memory"]["found"].split()[0]) <= int(total.split()[1]) / 2**20 + 0.5


@pytest.mark.parametrize("able", [True, False])
def test_a_cpu_without_bf16_holds_it_in_fp32(half_width, able):
    half_width(able)
    found = doctor.PROBES["half_precision"]()
    assert found.ok == able
    assert ("in twice the memory" in found.means) == (not able)


@pytest.mark.parametrize(("load", "free"), [(0.5, True), (5.0, False)])
def test_other_work_is_told_of(monkeypatch, load, free):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = doctor.PROBES["load"]()
    assert (found.ok, found.found, found.means[-1]) == (free, f"{load} on 8 cores", "8" if free else "3")


@pytest.mark.usefixtures("_compiled_anew")
def test_without_a_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("ROI_CACHE", str(tmp_path / "cache"))
    assert run("doctor", "--json", tmp_path / "doctor.json") == 0  # there is a fallback
    report = json.loads((tmp_path / "doctor.json").read_text())
    for name in ("compiler", "kernels"):
        assert not report[name]["ok"]
        assert "none of c++, g++, clang++ is installed" in report[name]["found"]
