"""Learning on the answers of chats: from the files to the figures of a run."""

import json
import math
import shutil

import pytest
import torch
from torch.nn import functional as F

from helpers.lab import make_lab, run
from helpers.text_files import CHAT_TEMPLATE, write_jsonl
from helpers.tiny_models import tiny_tokenizer
from roi_lightning.data import Corpus
from roi_lightning.learning.callbacks import BaselineSummary

lab = pytest.fixture(make_lab)
# Nine letters of a name and its brackets: an answer is all that is neither asked nor a role.
CHATS = [
    [
        {"role": "user", "content": f"{n} and {n + 1}"},
        {"role": "assistant", "content": f"that is {2 * n + 1}, and {n} dogs ran home from the mat"},
    ]
    for n in range(60)
]


def answered(lab, loss_on="answers", **options):
    """A data module whose training and held-out text are chats."""
    path = write_jsonl(lab.folder / "chats.jsonl", CHATS, "messages")
    corpora = [Corpus(path, messages_field="messages", loss_on=loss_on)]
    data = lab.data(corpora=corpora, val_corpora=corpora, val_windows=7, val_batch_size=3, **options)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    data.text_tokenizer = tokenizer
    return data


def slow_perplexity(lm, data):
    ids = data.windows("val", 7)
    labels = data.held_out_labels(7)
    with torch.no_grad():
        logits = lm(input_ids=ids).logits[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(7, -1)
    counted = [
        float(nll[i, j]) for i in range(7) for j in range(31) if labels is None or labels[i, j + 1] >= 0
    ]
    return math.exp(sum(counted) / len(counted))


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_held_out_figures_of_a_run_are_means_over_the_tokens_that_count(lab, loss_on):
    data = answered(lab, loss_on)
    trainer = {"limit_val_batches": 1.0, "val_check_interval": 2, "check_val_every_n_epoch": None}
    learner, fitter = lab.learn(2, data=data, dtype="float32", callbacks=[BaselineSummary()], trainer=trainer)
    wanted = slow_perplexity(learner.harden(), data)
    dense = slow_perplexity(learner.teacher, data)
    summary = json.loads(next(lab.folder.rglob("summary.json")).read_text())["perplexity"]
    assert list(summary) == ["dense", "magnitude", "roi"], "there was no prior"
    assert summary == pytest.approx(summary | {"roi": wanted, "dense": dense}, rel=1e-4)
    assert float(fitter.callback_metrics["val/perplexity"]) == pytest.approx(wanted, rel=1e-4)


def test_pruning_without_a_loss_reads_chats_and_refuses_a_loss(lab, capsys):
    tokenizer = json.loads((lab.model / "tokenizer_config.json").read_text())
    model = shutil.copytree(lab.model, lab.folder / "chat_model")
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": CHAT_TEMPLATE}))
    path = write_jsonl(lab.folder / "chats.jsonl", CHATS, "messages")
    words = ["--method", "wanda", "--windows", 2, "--seq_len", 32, "--device", "cpu", "--overwrite"]

    def prune(more=""):
        corpus = f"{{source: {path}, messages_field: messages{more}}}"
        return run("prune", model, "--corpora", corpus, *words, "--out", lab.folder / "out")

    assert prune() == 0
    assert prune(", loss_on: answers") != 0
    assert "has no loss" in capsys.readouterr().err
