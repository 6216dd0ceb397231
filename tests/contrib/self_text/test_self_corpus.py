"""The file of sampled documents: the same after an interruption, reused where it fits, refused where it doesn't."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from helpers.tiny_models import tiny_llama, tiny_tokenizer
from roi_lightning.contrib.self_text.corpus import UNFINISHED, Author, write_samples
from roi_lightning.contrib.self_text.samples import sample_documents
from roi_lightning.contrib.self_text.settings import SampleSettings, about
from roi_lightning.data import Corpus
from roi_lightning.data.corpora import load_documents
from roi_lightning.errors import UserError
from roi_lightning.models.source import resolve_model

SETTINGS = SampleSettings(tokens=500, max_tokens=40)


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    source = resolve_model(str(tiny_llama(tmp_path_factory.mktemp("author") / "model")))
    options = {"source": source, "tokenizer": tiny_tokenizer(), "device": torch.device("cpu")}
    return Author(**options, batch_size=3)


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def count(author, path):
    return sum(len(author.tokenizer(text)["input_ids"]) for text in texts(path))


def test_the_file_is_a_corpus_of_as_many_tokens_as_were_asked_for(author, tmp_path):
    out = tmp_path / "a.jsonl"
    facts = write_samples(author, SETTINGS, out)
    assert json.loads(about(out).read_text()) == facts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.about.json", "a.jsonl"]
    assert facts["text"]["tokens"] == count(author, out) >= 500
    assert count(author, out) - len(author.tokenizer(texts(out)[-1])["input_ids"]) < 500
    assert facts["text"]["documents"] == len(texts(out))
    assert facts["text"]["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    first = [
        x.text for x in sample_documents(author.load(), author.tokenizer, SETTINGS, range(len(texts(out))))
    ]
    assert texts(out) == first
    read = load_documents(Corpus(str(out)), str(tmp_path / "cache"))
    assert [row["text"] for row in read] == first
    assert (
        write_samples(replace(author, batch_size=8), SETTINGS, tmp_path / "b.jsonl")["text"] == facts["text"]
    )
    other = write_samples(author, replace(SETTINGS, seed=1), tmp_path / "c.jsonl")
    assert other["text"]["sha256"] != facts["text"]["sha256"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("torn", [b"", b'[{"text": "half a l'])
def test_an_interrupted_run_goes_on_to_the_same_text(author, tmp_path, monkeypatch, caplog, torn):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    write_samples(author, SETTINGS, whole)

    def sample(lm, tokenizer, settings, numbers, report):
        if numbers[0] > 2:
            raise Killed
        return sample_documents(lm, tokenizer, settings, numbers, report)

    monkeypatch.setattr("roi_lightning.contrib.self_text.corpus.sample_documents", sample)
    with pytest.raises(Killed):
        write_samples(author, SETTINGS, out)
    unfinished = out.with_name(out.name + UNFINISHED)
    assert not out.exists()
    assert not about(out).exists()
    with unfinished.open("ab") as stream:
        stream.write(torn)
    with pytest.raises(UserError, match="is left of other samples, with another seed; remove it"):
        write_samples(author, replace(SETTINGS, seed=1), out)
    monkeypatch.setattr("roi_lightning.contrib.self_text.corpus.sample_documents", sample_documents)
    with caplog.at_level("INFO"):
        write_samples(author, SETTINGS, out)
    assert "sampling resumes after 3 documents" in caplog.text
    assert out.read_bytes() == whole.read_bytes()
    assert not unfinished.exists()
