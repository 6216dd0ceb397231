"""Windows of tokenizers that put a BOS before a text, and of those that put none; digits of those in GGUF files."""

import json
from itertools import cycle, islice, product

import pytest
import torch

from helpers.lab import run
from helpers.slow_perplexity import by_a_loop
from helpers.text_files import (
    BOS,
    LIGHTNING_REMARKS,
    TinyData,
    byte_tokenizer,
    data,
    documents,
    reference_windows,
    write_jsonl,
)
from helpers.tiny_models import tiny_gguf, tiny_llama
from roi_lightning.data import Corpus
from roi_lightning.data.packing import find_bos
from roi_lightning.evaluation.perplexity import Cut, token_perplexity
from roi_lightning.models.config import load_tokenizer
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

pytestmark = LIGHTNING_REMARKS
WITH_BOS = "<s> $A"
OTHERS = [(False, 2), *product((False, True), (16, 1000))]


@pytest.mark.parametrize(
    ("around", "expected"), [("$A", None), ("$A </s>", None), (WITH_BOS, BOS), ("<s> $A </s>", BOS)]
)
def test_bos_is_what_the_tokenizer_puts_before_a_text(around, expected):
    assert find_bos(byte_tokenizer(around)) == expected
    assert find_bos(byte_tokenizer(around, "ACGT")) == expected


@pytest.mark.parametrize(
    ("split", "pieces"),
    [("smollm", ["a", "ĠĠ", "1", "2"]), ("gpt-2", ["a", "Ġ", "Ġ12"]), ("exaone-moe", ["a", "Ġ", "Ġ12"])],
)
def test_a_gguf_file_says_whether_digits_are_pieces_of_their_own(tmp_path, split, pieces):
    file = tiny_gguf(tmp_path / "m.gguf", add_tokenizer_pre=split)
    found = load_tokenizer(str(file)).backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in found] == pieces


@pytest.mark.parametrize(
    ("bos", "seq_len"),
    [
        *((True, 2), (False, 7), (True, 7)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_cached_and_streamed_windows_equal_a_plain_python_reference(tmp_path, bos, seq_len):
    texts = documents(70)
    path, held_out = (
        write_jsonl(tmp_path / name, part)
        for name, part in (("a.jsonl", texts), ("v.jsonl", documents(90, "v")))
    )
    options = {"val_corpora": held_out, "seq_len": seq_len, "val_windows": 10**6, "bos": bos}
    cached, streamed = (data(tmp_path, [Corpus(path, streaming=s)], **options) for s in (False, True))
    expected = reference_windows(texts, seq_len, [BOS] if bos else [])
    assert all((window[0] == BOS) == bos and len(window) == seq_len for window in expected)
    cached.setup("fit")
    assert cached._packed[0]["input_ids"][:].tolist() == expected
    assert cached.train_tokens == len(expected) * seq_len
    some = len(expected) + 3
    assert streamed.windows("train", some).tolist() == list(islice(cycle(expected), some))
    wanted = reference_windows(documents(90, "v"), seq_len, [BOS] if bos else [])
    assert cached.windows("val", len(wanted)).tolist() == wanted


def test_a_place_in_streamed_text_is_a_place_in_the_text_alone(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(200))
    module = TinyData(corpora=[Corpus(path, streaming=True)], seq_len=16, held_out_fraction=0.2, bos=True)
    module.setup("fit")
    (substream,) = module._substreams
    items = list(islice(substream.windows(), 400))
    for index in range(0, 390, 13):
        _, position = items[index]
        carry = position["corpora"][0]["carry"]
        assert carry is None or (len(carry) < 15 and BOS not in carry.tolist())
        entered = [window.tolist() for window, _ in islice(substream.windows(position), 5)]
        assert entered == [window.tolist() for window, _ in items[index + 1 : index + 6]]


def test_a_stream_is_known_by_its_bos(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(60))
    for bos in (False, True):
        module = data(tmp_path, [Corpus(path, streaming=True)], bos=bos)
        module.setup("fit")
        names = {"corpora", "tokenizer", "seq_len", "seed", "held_out_fraction"}
        assert set(module._described()) == {
            *(f"data.{x}" for x in names),
            "lanes",
            *(["data.bos"] if bos else []),
        }


@pytest.fixture
def lm(tmp_path):
    return load_language_model(resolve_model(str(tiny_llama(tmp_path / "llama"))))


@pytest.mark.parametrize(
    ("length", "keep_tail"), [(300, True), (300, False), (253, True), (253, False), (1, True)]
)
def test_perplexity_with_bos_predicts_every_token_of_the_text_once(lm, length, keep_tail):
    ids = torch.randint(250, (length,), generator=torch.Generator().manual_seed(1))
    cut = Cut(64, keep_tail, bos=BOS)
    windows = [torch.tensor([BOS, *part]) for part in ids.split(63) if keep_tail or len(part) == 63]
    counted = [token for window in windows for token in window[1:].tolist()]
    assert counted == ids[: length if keep_tail else length // 63 * 63].tolist()
    batches = cut.batches(ids, 3)
    assert [row.tolist() for batch in batches for row in batch] == [window.tolist() for window in windows]
    assert token_perplexity(lm, cut.batches(ids, 3)) == pytest.approx(by_a_loop(lm, windows), rel=1e-5)


def test_the_text_has_no_bos_of_its_own_where_every_window_has_one():
    tokenizer = byte_tokenizer(WITH_BOS)
    ids = tokenizer("some text", add_special_tokens=False)["input_ids"]
    assert Cut(64, bos=BOS).encode(tokenizer, "some text").tolist() == ids
    assert Cut(64).encode(tokenizer, "some text").tolist() == [BOS, *ids]


def test_evaluate_opens_every_window_and_wandas_protocol_only_the_first(tmp_path, capsys):
    base = tiny_llama(tmp_path / "base", max_position_embeddings=2048)
    byte_tokenizer(WITH_BOS).save_pretrained(base)
    text, out = tmp_path / "text.txt", tmp_path / "o.json"
    text.write_text("some text\n" * 500)
    tasks = "token_perplexity,token_perplexity_2048"
    arguments = [base, "--tasks", tasks, "--text", text, "--json", out]
    assert run("evaluate", *arguments) == 0
    found = json.loads(out.read_text())
    lm = load_language_model(resolve_model(str(base)))
    tokenizer = byte_tokenizer()
    ids = torch.tensor(tokenizer("some text\n" * 500)["input_ids"])
    windows = [torch.tensor([BOS, *part]) for part in ids.split(1023)]
    figures = found["models"][str(base)]
    assert figures["token_perplexity"] == pytest.approx(by_a_loop(lm, windows), rel=1e-5)
    joined = torch.tensor([BOS, *tokenizer("\n\n".join(["some text\n"] * 500))["input_ids"]])
    windows = joined[: len(joined) // 2048 * 2048].split(2048)
    assert figures["token_perplexity_2048"] == pytest.approx(by_a_loop(lm, windows), rel=1e-5)
    assert found["settings"]["bos"] == {str(base): "<s>"}
    assert "which is never predicted" in " ".join(capsys.readouterr().out.split())
