"""`sample`, and `self` as the text of `prune`, `fit` and the functions of the API."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_helpers import make_lab, plain_text, run
from roi_lightning.api import learn, prune
from roi_lightning.data import Corpus
from roi_lightning.data.self_corpus import Author, about
from roi_lightning.masks.mask_set import MaskSet
from tiny_models import tiny_qwen2

lab = pytest.fixture(make_lab)
TITLE = "self (900 tokens of seed 2)"
SELF = {"source": "self", "tokens": 900, "max_tokens": 60, "seed": 2}
SETTINGS = ["--tokens", 900, "--max_tokens", 60, "--seed", 2]
PRUNED = ["--method", "wanda", "--windows", 3, "--seq_len", 32]


def sample(lab, *options, out="samples.jsonl"):
    return run("sample", lab.model, *SETTINGS, "--device", "cpu", "--out", out, *options)


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def same_masks(*folders):
    one, other = (MaskSet.load(Path(folder)) for folder in folders)
    return all(torch.equal(one.layers[name].packed, other.layers[name].packed) for name in one.layers)


def test_sampled_text_is_what_self_stands_for(lab, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("roi_lightning.utils.progress._EVERY_SECONDS", 0.0)
        assert sample(lab) == 0
    (said, reported), out = capsys.readouterr(), lab.folder / "samples.jsonl"
    assert re.search(r"^sampling tokens \d+/900  \S+/s  0:00:0\d left$", reported, re.MULTILINE)
    facts = json.loads(about(out).read_text())
    assert f"samples.jsonl: {len(texts(out))} documents of {facts['text']['tokens']:,} tokens" in said
    assert (
        "dropped: {empty} empty, {repeats} repeats, {loops} loops".format(**facts["text"]["dropped"]) in said
    )
    assert "tokens/s)" in said
    for corpus, name in (("samples.jsonl", "a"), (yaml.safe_dump(SELF, default_flow_style=True), "b")):
        words = [*PRUNED, "--device", "cpu", "--corpora", corpus.strip(), "--out", name]
        assert run("prune", lab.model, *words) == 0
    assert TITLE in plain_text(capsys.readouterr().out)
    assert json.loads((lab.folder / "b/roi_sparsity.json").read_text())["training"]["text"] == TITLE
    assert f"`{TITLE}`" in (lab.folder / "b/README.md").read_text()
    assert same_masks("a", "b")
    assert run("prune", lab.model, *PRUNED, "--corpora", lab.corpus, "--out", "c") == 0
    assert not same_masks("a", "c")


def test_a_file_that_is_there_is_never_replaced(lab, capsys):
    for name in ("samples.jsonl", "samples.about.json"):
        (lab.folder / name).write_text("mine")
        assert sample(lab) == 1
        assert f"{name}' is there already; remove it or give another --out" in capsys.readouterr().err
        assert (lab.folder / name).read_text() == "mine"
        (lab.folder / name).unlink()


REFUSED = {
    "a name that is no .jsonl": (["--out", "samples.txt"], "give a name that ends in .jsonl"),
    "no tokens": (["--tokens", "0"], "tokens of sampled text is 0; give a whole number of at least 1"),
    "no batch": (["--batch_size", "0"], "--batch_size is 0; give at least 1"),
    "an unknown start": (["--start", "<s>"], "the tokenizer has no token '<s>'; set start"),
    "longer than the model": (["--max_tokens", "200"], "reads at most 128 tokens; lower it"),
    "no such device": (["--device", "gpu"], "use auto, cpu, cuda"),
    "a folder that is none": (["--out", "/proc/samples.jsonl"], "/proc/samples.jsonl"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_clear_line_and_leaves_nothing(lab, capsys, options, said):
    assert sample(lab, *options) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said in line
    assert not list(lab.folder.iterdir())


def test_a_run_learns_from_self_and_knows_it_from_another(lab):
    data = lab.data(corpora=[Corpus(**SELF)], held_out_fraction=0.3)
    learner, _ = lab.learn(1, data=data)
    assert data.facts(2)["text"] == TITLE
    assert data.train_tokens > 300
    (described,) = learner.run_recipe["data.corpora"]
    assert described == described | SELF
    other = tiny_qwen2(lab.folder / "other", seed=1)
    for corpus, model in ((SELF, other), (SELF | {"seed": 3}, lab.model)):
        changed = lab.data(corpora=[Corpus(**corpus)], held_out_fraction=0.3, tokenizer=str(model)).recipe()
        assert changed["data.corpora"] != [described]
    assert lab.data(corpora=[Corpus(**SELF)]).recipe()["data.corpora"] == [described]


@pytest.mark.slow
def test_fit_learns_from_self_and_notices_another(lab, capsys):
    corpora = [SELF | {"max_tokens": 50}]
    lean = [*lab.quick("--trainer.logger", "false", max_steps=1), "--data.held_out_fraction", "0.3"]

    def fit(*more):
        (lab.folder / "self.yaml").write_text(yaml.safe_dump({"data": {"corpora": corpora}}))
        return run("fit", *lean, "--config", "self.yaml", "--run", "a", *more)

    assert fit() == 0
    folder = lab.folder / "runs/a"
    assert json.loads((folder / "export/roi_sparsity.json").read_text())["training"]["text"] == TITLE
    checkpoint = min(folder.glob("checkpoints/*.ckpt"))
    corpora[0]["seed"] = 3
    assert fit("--ckpt_path", checkpoint, "--trainer.max_steps", "2") == 1
    assert "data.corpora differs" in capsys.readouterr().err


def test_the_api_samples_the_model_in_memory(lab, monkeypatch):
    lm, tokenizer = (x.from_pretrained(lab.model) for x in (AutoModelForCausalLM, AutoTokenizer))
    lm.lm_head.weight.data[:200] -= 0.5
    loaded, mode = [], lm.training
    load = Author.load
    monkeypatch.setattr(Author, "load", lambda author: loaded.append(author.lm) or load(author))
    corpus = Corpus(**SELF)
    prune(lm, tokenizer, [corpus], windows=3, seq_len=32, device="cpu")
    learn(lm, tokenizer, [corpus], steps=1, seq_len=32, accelerator="cpu", enable_progress_bar=False)
    assert len(loaded) == 1, "the second reads what the first has written"
    assert torch.equal(loaded[0].lm_head.weight, lm.lm_head.weight)
    assert lm.training == mode
