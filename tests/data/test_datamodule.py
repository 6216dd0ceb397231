import random
from collections import Counter
from itertools import chain, islice
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from helpers.text_files import (
    LIGHTNING_REMARKS,
    TinyData,
    byte_tokenizer,
    data,
    documents,
    fit,
    reference_windows,
    write_jsonl,
)
from helpers.tiny_models import tiny_tokenizer
from roi_lightning.data import Corpus, packing
from roi_lightning.data.packing import belongs
from roi_lightning.data.resumable_order import ResumableSampler
from roi_lightning.errors import UserError

pytestmark = LIGHTNING_REMARKS


def all_training_windows(module):
    module.setup("fit")
    return sorted(module.windows("train", module.train_tokens // module.seq_len).tolist())


@pytest.mark.parametrize("streaming", [False, True])
def test_split_by_document_never_leaks(tmp_path, streaming):
    texts = [text for text in documents(200) for _ in range(2)] + [" \n", ""]
    random.Random(1).shuffle(texts)
    train, val = ([t for t in texts if belongs(t, side, 0.2)] for side in ("train", "val"))
    assert sorted(train + val) == sorted(t for t in texts if t.strip())
    assert not set(train) & set(val)
    assert 0.1 < len(val) / 400 < 0.3
    corpus = Corpus(write_jsonl(tmp_path / "a.jsonl", texts), streaming=streaming)
    module = data(tmp_path, [corpus], val_windows=10_000)
    if streaming:
        expected = reference_windows(train, 16)
        assert module.windows("train", len(expected) + 1).tolist() == [*expected, expected[0]]
    else:
        assert all_training_windows(module) == sorted(reference_windows(train, 16))
    module.setup("validate")
    assert module.windows("val", module.val_tokens // 16).tolist() == reference_windows(val, 16)


def test_surrounding_space_does_not_change_the_side():
    for text in documents(50):
        assert belongs(text, "val", 0.5) == belongs(f"\n {text} ", "val", 0.5) != belongs(text, "train", 0.5)
    assert not belongs(None, "all", 0.5)


def test_held_out_windows_are_spread_over_corpora_and_text(tmp_path):
    paths = [write_jsonl(tmp_path / f"{mark}.jsonl", documents(100, mark)) for mark in "xy"]
    module = data(tmp_path, "python-docs", val_corpora=paths, val_windows=8)
    module.setup("validate")
    chosen = module.windows("val", 8).tolist()
    for mark, share in (("x", chosen[:4]), ("y", chosen[4:])):
        reference = reference_windows(documents(100, mark), 16)
        positions = [reference.index(window) for window in share]
        assert [position * 4 // len(reference) for position in positions] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="9 held-out windows"):
        module.windows("val", 9)


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_mix_corpora(tmp_path, streaming):
    corpora = [
        Corpus(write_jsonl(tmp_path / f"{mark}.jsonl", [mark * 4000]), weight, streaming=streaming)
        for mark, weight in (("x", 3), ("y", 1))
    ]
    held_out = write_jsonl(tmp_path / "val.jsonl", documents(50))
    module = data(tmp_path, corpora, val_corpora=held_out)
    seen = Counter(byte_tokenizer().batch_decode(module.windows("train", 600)[:, :1]))
    assert 0.68 < seen["x"] / 600 < 0.82
    assert set(seen) == {"x", "y"}


def test_cache_is_reused_and_depends_on_what_matters(tmp_path, monkeypatch):
    calls, original = [], packing.tokenize
    monkeypatch.setattr(packing, "tokenize", lambda *given: calls.append(1) or original(*given))

    def files(**options):
        options = {"seq_len": 16, "held_out_fraction": 0.2, "cache_dir": str(tmp_path / "cache")} | options
        calls.clear()
        TinyData(corpora=str(tmp_path / "a.jsonl"), **options).setup("fit")
        return {path.name for path in (tmp_path / "cache").rglob("*.arrow")}, len(calls)

    write_jsonl(tmp_path / "a.jsonl", documents(300))
    first, used = files()
    assert used > 0
    assert files() == (first, 0)
    longer, used = files(seq_len=32)
    assert used == 0
    assert longer > first
    split, used = files(held_out_fraction=0.3)
    assert used > 0
    assert split > longer


def test_a_tokenizer_is_given_its_own_tokens(tmp_path):
    """One cache for all: a wrong name in it would hand a model the tokens of another."""
    path = write_jsonl(tmp_path / "a.jsonl", documents(300))

    class Given(TinyData):
        def load_tokenizer(self):
            return tokenizer

    other_end = byte_tokenizer()
    other_end.eos_token = "!"
    for tokenizer in [byte_tokenizer(), tiny_tokenizer(), other_end, byte_tokenizer()]:
        module = Given(corpora=path, seq_len=16, held_out_fraction=0.2, cache_dir=str(tmp_path / "cache"))
        end = tokenizer.eos_token_id
        texts = [text for text in documents(300) if belongs(text, "train", 0.2)]
        stream = list(
            chain.from_iterable([*tokenizer.encode(t, add_special_tokens=False), end] for t in texts)
        )[:-1]
        expected = [stream[i : i + 16] for i in range(0, len(stream) - 15, 16)]
        assert all_training_windows(module) == sorted(expected)


@pytest.mark.parametrize(("world", "batch"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_order_is_shuffled_complete_and_resumable(world, batch):
    items, micro_batches = 10, 17

    def run(rank, start=0):
        return list(
            ResumableSampler(items, micro_batches, batch, seed=5, rank=rank, world_size=world, start=start)
        )

    whole = [run(rank) for rank in range(world)]
    rows = [whole[r][k * batch : (k + 1) * batch] for k in range(micro_batches) for r in range(world)]
    positions = list(chain(*rows))
    assert positions == list(ResumableSampler(items, len(positions), seed=5))
    passes = [positions[i : i + items] for i in range(0, len(positions) - items + 1, items)]
    assert all(sorted(one) == list(range(items)) for one in passes)
    assert len({tuple(one) for one in passes}) == len(passes)
    for rank in range(world):
        for start in range(micro_batches + 1):
            assert whole[rank][: start * batch] + run(rank, lambda start=start: start) == whole[rank]
        assert len(ResumableSampler(items, micro_batches, batch, start=4)) == micro_batches * batch


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("accumulate", "max_epochs"), [(1, 1), (3, None)])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, streaming, accumulate, max_epochs):
    # fewer windows than the run takes, so that it passes over them more than once
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))

    def module():
        return data(tmp_path, [Corpus(path, streaming=streaming)], batch_size=2, val_windows=3)

    options = {"accumulate": accumulate, "max_epochs": max_epochs}
    whole, trainer = fit(module(), tmp_path / "whole", 8, 20, **options)
    assert trainer.global_step == 20
    assert trainer.num_training_batches == (float("inf") if streaming else 20 * accumulate)
    assert len(whole.seen) == 20 * accumulate
    assert all(torch.tensor(batch).shape == (2, 16) for batch in whole.seen)
    resumed, trainer = fit(module(), tmp_path / "rest", 8, 20, tmp_path / "whole" / "step=8.ckpt", **options)
    assert trainer.global_step == 20
    assert whole.seen[: 8 * accumulate] + resumed.seen == whole.seen
    torch.testing.assert_close(resumed.embedding.weight, whole.embedding.weight, rtol=0, atol=0)


def test_resumed_run_validates_and_workers_keep_the_order(tmp_path):
    inner = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    whole, _ = fit(data(tmp_path, val_windows=3), tmp_path / "whole", 6, 12, **inner)
    assert whole.validated == 9
    forked = data(tmp_path, val_windows=3, num_workers=2)
    resumed, trainer = fit(forked, tmp_path / "rest", 6, 12, tmp_path / "whole" / "step=6.ckpt", **inner)
    assert resumed.seen == whole.seen[6:]
    assert resumed.validated == 6
    assert trainer.global_step == 12


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_step_takes_the_same_windows_on_any_number_of_ranks(tmp_path, streaming, world):
    path = write_jsonl(tmp_path / "a.jsonl", documents(60))
    module = data(tmp_path, [Corpus(path, streaming=streaming)], batch_size=2, windows_per_step=16)
    module.setup("fit")
    parts, steps = module.micro_batches(world), [[], []]
    for rank in range(world):
        module.trainer = SimpleNamespace(
            max_steps=2, accumulate_grad_batches=parts, global_step=0, global_rank=rank, world_size=world
        )
        for number, batch in enumerate(islice(module.train_dataloader(), 2 * parts)):
            steps[number // parts] += batch["input_ids"].tolist()
    wanted = module.windows("train", 32).tolist()
    assert [sorted(step) for step in steps] == [sorted(wanted[:16]), sorted(wanted[16:])]


def first_window(module):
    module.setup("fit")
    return module.windows("train", 1)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["", " "], {}, "no documents with text|less text than one window"),
        (
            ["short"],
            {"val_corpora": "long"},
            "has only 5 tokens, one window needs 16|less text than one window",
        ),
        (
            ["one long document only " * 9],
            {"held_out_fraction": 1e-9},
            r"held-out text .* is shorter than one window",
        ),
        (["one long document only " * 9], {"held_out_fraction": 1 - 1e-9}, "left for training|less text"),
    ],
)
def test_too_little_text(tmp_path, texts, options, message, streaming):
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    if "val_corpora" in options:
        options = {"val_corpora": write_jsonl(tmp_path / "val.jsonl", ["x" * 99])}
    module = data(tmp_path, [Corpus(path, streaming=streaming)], **options)
    with pytest.raises(UserError, match=message) as raised:
        first_window(module)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_only_text_that_holds_a_token_without_an_embedding_is_refused(tmp_path, streaming):
    for count, embedded, holds in ((1, 256, False), (90, 257, False), (90, 256, True)):
        corpora = [Corpus(write_jsonl(tmp_path / "a.jsonl", documents(count)), streaming=streaming)]
        module = data(tmp_path, corpora, val_corpora=corpora, seq_len=8)
        module.check_model("a model", LlamaConfig(vocab_size=embedded))
        if holds:  # END comes between documents
            with pytest.raises(UserError, match=r"'</s>', number 256: .* has 257 .* embeds 256"):
                module.setup("fit")
        else:
            module.setup("fit")
