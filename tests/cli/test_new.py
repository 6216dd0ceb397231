"""`new`: what it makes, and what it refuses to."""

import re
import tomllib
from pkgutil import resolve_name

import pytest
import yaml

from helpers.lab import run
from helpers.refusals import assert_refused, make_bench

bench = pytest.fixture(make_bench)


def test_a_project_has_its_own_name_throughout(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "parent/Own-masks"
    assert run("new", folder) == 0
    made = {str(x.relative_to(folder)): x.read_text() for x in folder.rglob("*") if x.is_file()}
    project, told = tomllib.loads(made["pyproject.toml"])["project"], capsys.readouterr().out
    assert (len(made), project["name"]) == (8, "Own-masks")
    assert all(f"  {name}\n" in told for name in made)
    assert "python -m Own_masks fit --config configs/Own_masks.yaml\n" in told
    assert not re.search("my.project", "".join([*made, *made.values()]))
    monkeypatch.syspath_prepend(folder)
    classes = [resolve_name(path) for path in project["entry-points"]["roi_lightning.classes"].values()]
    config = yaml.safe_load(made["configs/Own_masks.yaml"])
    assert {resolve_name(config[part]["class_path"]) for part in ("model", "data")} < {*classes}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, "can't name a Python package; give") for name in ("class", "a.b", "2of4", "maß", "a-")),
        *((name, "would hide the module") for name in ("torch", "json", "tests")),
        *((name, "is there already; give") for name in (".", "full", "full/file")),
        ("full/file/mine", "can't be written"),
    ],
)
def test_a_folder_that_can_t_be_a_project_is_refused(name, says, bench, capsys):
    bench.write("full/file", "mine")
    assert_refused(bench, capsys, ["new", name], says)
