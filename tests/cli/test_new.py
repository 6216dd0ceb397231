"""`new`: what it makes, and what it refuses to."""

import ast
import re
import tomllib

import pytest
import yaml

from helpers.lab import run
from helpers.refusals import assert_refused, make_bench
from roi_lightning.cli.new import main

bench = pytest.fixture(make_bench)


def test_a_project_has_its_own_name_throughout(tmp_path, capsys):
    folder = tmp_path / "parent/Own-masks"
    assert main([str(folder)]) == 0
    made = {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*.*")
        if path.is_file()
    }
    assert made.keys() == {
        *("README.md", "pyproject.toml", "configs/Own_masks.yaml", ".github/workflows/tests.yml"),
        *(f"Own_masks/{name}.py" for name in ("__init__", "__main__", "corpus")),
        "tests/test_Own_masks.py",
    }
    assert not re.search("my.project", "".join(made.values()))
    told = capsys.readouterr().out
    assert all(f"  {name}\n" in told for name in made)
    assert "python -m Own_masks fit --config configs/Own_masks.yaml\n" in told
    classes = {
        f"Own_masks{part}:{node.name}"
        for name, part in (("__init__", ""), ("corpus", ".corpus"))
        for node in ast.parse(made[f"Own_masks/{name}.py"]).body
        if isinstance(node, ast.ClassDef)
    }
    project = tomllib.loads(made["pyproject.toml"])["project"]
    assert project["name"] == "Own-masks"
    assert {*project["entry-points"]["roi_lightning.classes"].values()} == classes
    config = yaml.safe_load(made["configs/Own_masks.yaml"])
    named = {config[part]["class_path"] for part in ("model", "data")}
    assert named < {name.replace(":", ".") for name in classes}


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "mine").mkdir()
    assert run("new", tmp_path / "mine") == 0
    assert (tmp_path / "mine/pyproject.toml").is_file()


REFUSALS = {
    "a word of Python": ("class", "can't name a Python package"),
    "a sign": ("a.b", "can't name a Python package"),
    "a digit first": ("2of4", "can't name a Python package"),
    "other letters": ("maß", "can't name a Python package"),
    "this folder": (".", "is there already"),
    "a folder with content": ("full", "'full' is there already"),
    "a file": ("full/file", "'full/file' is there already"),
    "a library": ("torch", "would hide the module 'torch'"),
    "a module of Python": ("json", "would hide"),
    "one of its own folders": ("tests", "would hide"),
    "below a file": ("full/file/mine", "can't be written"),
}


@pytest.mark.parametrize(("name", "says"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_folder_that_can_t_be_a_project_is_refused(name, says, bench, capsys):
    bench.write("full/file", "mine")
    assert_refused(bench, capsys, ["new", name], says)
