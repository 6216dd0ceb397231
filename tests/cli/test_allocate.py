"""`allocate`: what it writes is what `prune` and `fit` read; what it refuses."""

import re

import pytest
import yaml

from cli_helpers import make_lab, run
from roi_lightning.cli import allocate
from roi_lightning.cli.lightning import build
from roi_lightning.export.sidecar import read_sidecar

lab = pytest.fixture(make_lab)
COMMAND = ["--windows", "2", "--seq_len", "32", "--device", "cpu", "--out", "patterns.yaml"]


def run_allocate(lab, *more):
    return run("allocate", lab.model, "--corpora", lab.corpus, *COMMAND, *more)


def test_it_writes_an_overlay_that_keeps_to_the_budget_and_others_read(lab, capsys):
    assert run_allocate(lab, "--choices", "1:4,2:4,dense") == 0
    said = capsys.readouterr().out
    patterns = yaml.safe_load((lab.folder / "patterns.yaml").read_text())["model"]["init_args"]["patterns"]
    assert len(patterns) == 14
    assert set(patterns.values()) <= {"1:4", "2:4", "dense"}
    assert (
        run("prune", lab.model, "--method", "magnitude", "--patterns", "patterns.yaml", "--out", "pruned")
        == 0
    )
    counts = read_sidecar(lab.folder / "pruned")["mixed_patterns"]
    assert 2 * counts["kept"] <= counts["prunable"]
    # A step of the smallest layer from 1:4 to 2:4 would not fit any more.
    assert counts["kept"] > counts["prunable"] / 2 - 8 * 64 * 128
    assert (
        f"{counts['kept']:,} of {counts['prunable']:,} weights kept (50.00%), mixed patterns; 2:4 keeps 36,864"
        in said
    )
    assert re.search(r"down_proj .*\n", said)
    config = build(["--config", "quickstart.yaml", *lab.options(), "-c", "patterns.yaml"])
    assert config.model.given_pattern.spelled() == {"*": "2:4", **patterns}

    before = (lab.folder / "patterns.yaml").read_bytes()
    assert run_allocate(lab) != 0
    assert "'patterns.yaml' is there already; give another --out, or --overwrite" in capsys.readouterr().err
    assert (lab.folder / "patterns.yaml").read_bytes() == before


def test_it_gives_more_to_the_layers_that_need_it(lab, monkeypatch):
    """Costs that are known: down projections cost much, query projections nothing, all others the same."""

    def known(lm, layers, choices, windows):
        factor = {name: 9.0 if "down" in name else 0.0 if "q_proj" in name else 1.0 for name in layers}
        return {name: {p: factor[name] * (1 - p.n / p.m) for p in own} for name, own in choices.items()}

    monkeypatch.setattr(allocate, "layer_costs", known)
    assert run_allocate(lab, "--overwrite", "--ignore", "k_proj") == 0
    patterns = yaml.safe_load((lab.folder / "patterns.yaml").read_text())["model"]["init_args"]["patterns"]
    assert {patterns[name] for name in patterns if "down" in name} == {"dense"}
    assert {patterns[name] for name in patterns if "q_proj" in name} == {"1:4"}
    assert not any("k_proj" in name for name in patterns)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["--budget", "1:4", "--choices", "2:4,dense"],
            "the sparsest choices keep .* add sparser choices",
        ),
        (["--budget", "half"], "pattern 'half' is not of the form N:M"),
        (["--choices", "2:4,x"], "pattern 'x' is not of the form N:M"),
        (["--choices", "dense"], "--choices dense holds no N:M"),
        (
            ["--choices", "3:5"],
            r"--choices 3:5: model\.layers\.0\.self_attn\.q_proj has 64 inputs.* add dense",
        ),
        (["--budget", "2:5"], r"pattern 2:5: .* has 64 inputs"),
        (["--out", "patterns.json"], r"give a name that ends in \.yaml"),
        (["--windows", "0"], "--windows is 0"),
        (["--targets", "nothing"], "'nothing' matches none"),
    ],
)
def test_what_can_not_be_allocated_is_refused_before_anything_is_read(more, says, lab, capsys):
    assert run("allocate", lab.model, "--corpora", "no-such-file.jsonl", *COMMAND, *more) != 0
    error = capsys.readouterr().err
    assert re.search(says, error), error
    assert not list(lab.folder.glob("patterns*"))
