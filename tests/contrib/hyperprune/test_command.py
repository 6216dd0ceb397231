"""`prune --method hyperprune`: by its short name, with options as a class."""

import json

import pytest

from helpers.lab import make_lab, run

lab = pytest.fixture(make_lab)


def prune(lab, method, *more):
    text = ["--corpora", lab.corpus, "--windows", 4, "--seq_len", 32, "--targets", "mlp.*", "--seed", 3]
    return run("prune", lab.model, "--method", method, *text, "--out", lab.folder / "out", *more)


def test_it_prunes_and_records_its_settings_and_the_seed(lab):
    assert prune(lab, "{class_path: HyperPrune, init_args: {steps: 2, hidden: 8, prior: sparsegpt}}") == 0
    assert run("verify", lab.folder / "out", "--base", lab.model) == 0
    recipe = json.loads((lab.folder / "out/roi_sparsity.json").read_text())["training"]
    settings = {"method": "hyperprune", "seed": 3, "steps": 2, "hidden": 8, "prior": "sparsegpt"}
    assert settings.items() <= recipe.items()


def test_too_many_candidates_are_refused_before_the_work(lab, capsys):
    assert prune(lab, "hyperprune", "--pattern", "8:16") == 1
    assert "8:16 has 12,870 candidate masks" in capsys.readouterr().err
