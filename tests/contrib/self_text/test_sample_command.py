"""`sample`: text that a model writes, to be used as any other."""

import json

import pytest

from helpers.lab import make_lab, run
from roi_lightning.contrib.self_text.settings import about

lab = pytest.fixture(make_lab)
SETTINGS = ["--tokens", 900, "--max_tokens", 60, "--seed", 2]
PRUNED = ["--method", "wanda", "--windows", 3, "--seq_len", 32]


def sample(lab, *options, out="samples.jsonl"):
    return run("sample", lab.model, *SETTINGS, "--device", "cpu", "--out", out, *options)


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_sampled_text_is_a_corpus(lab, capsys):
    assert sample(lab) == 0
    said, out = capsys.readouterr().out, lab.folder / "samples.jsonl"
    facts = json.loads(about(out).read_text())
    assert f"samples.jsonl: {len(texts(out))} documents of {facts['text']['tokens']:,} tokens" in said
    words = [*PRUNED, "--device", "cpu", "--corpora", "samples.jsonl", "--out", "a"]
    assert run("prune", lab.model, *words) == 0


def test_a_file_that_is_there_is_never_replaced(lab, capsys):
    for name in ("samples.jsonl", "samples.about.json"):
        (lab.folder / name).write_text("mine")
        assert sample(lab) == 1
        assert f"{name}' is there already; remove it or give another --out" in capsys.readouterr().err
        assert (lab.folder / name).read_text() == "mine"
        (lab.folder / name).unlink()
