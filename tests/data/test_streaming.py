"""Streamed corpora: any order of interruptions, workers and ranks gives the windows of one uninterrupted run."""

import gzip
import json
import re
from itertools import chain, cycle, islice
from pathlib import Path

import datasets
import pytest
import torch
from lightning.pytorch import Callback

from helpers.text_files import (
    LIGHTNING_REMARKS,
    Recorder,
    TinyData,
    byte_tokenizer,
    documents,
    fit,
    reference_windows,
    write_jsonl,
)
from helpers.tiny_models import tiny_tokenizer
from roi_lightning.data import Corpus, files

pytestmark = LIGHTNING_REMARKS
SHARDS = 32
TEXT_FEATURES = datasets.Features({"text": datasets.Value("string")})
READ = []


def shard_texts(mark, number):
    return documents(6, f"{mark}{number}.", seed=number)


def generate(mark, numbers):
    for number in numbers:
        for text in shard_texts(mark, number):
            READ.append(text)
            yield {"text": text}


class Generated(TinyData):
    """Streams documents made on the fly: a corpus is named by the mark of its documents."""

    shards = SHARDS

    def stream(self, corpus):
        kwargs = {"mark": corpus.source, "numbers": list(range(self.shards))}
        return datasets.IterableDataset.from_generator(generate, TEXT_FEATURES, kwargs)

    def load_tokenizer(self):
        return tiny_tokenizer() if self.tokenizer == "merging" else byte_tokenizer()


def generated(tmp_path, marks="x", **options):
    held_out = tmp_path / "val.jsonl"
    if not held_out.exists():
        write_jsonl(held_out, documents(30, "v"))
    corpora = [Corpus(mark, weight, streaming=True) for mark, weight in zip(marks, (3.0, 1.0), strict=False)]
    defaults = {"seq_len": 16, "batch_size": 2, "val_windows": 2, "cache_dir": str(tmp_path / "cache")}
    return Generated(**({"corpora": corpora, "val_corpora": str(held_out)} | defaults | options))


def substream_windows(mark, substream, substreams=SHARDS // 8, shards=SHARDS):
    """What a substream reads of a corpus, in plain Python: its shards, over and over."""
    numbers = range(shards * substream // substreams, shards * (substream + 1) // substreams)
    return cycle(reference_windows(list(chain.from_iterable(shard_texts(mark, n) for n in numbers)), 16))


@pytest.mark.parametrize(("shards", "substreams"), [(1, 1), (15, 1), (16, 2), (63, 7), (64, 8), (80, 8)])
def test_substreams_are_one_for_eight_shards_and_eight_at_most(tmp_path, monkeypatch, shards, substreams):
    monkeypatch.setattr(Generated, "shards", shards)
    streams = [substream_windows("x", substream, substreams, shards) for substream in range(substreams)]
    expected = [window for _ in range(5) for stream in streams for window in islice(stream, 2)]
    assert generated(tmp_path).windows("train", len(expected)).tolist() == expected


def test_mixed_corpora_keep_their_own_orders_and_weights(tmp_path):
    module = generated(tmp_path, "xy", batch_size=1)
    windows = module.windows("train", 4 * 300).tolist()
    for substream in range(4):
        read = {"x": [], "y": []}
        expected = {mark: list(islice(substream_windows(mark, substream), 300)) for mark in read}
        for window in windows[substream::4]:
            # The two corpora differ in their marks only, which not every window shows.
            fits = [mark for mark in read if window == expected[mark][len(read[mark])]]
            assert fits, "a window is the next one of one of the corpora"
            read[fits[0]].append(window)
        assert 0.6 < len(read["x"]) / 300 < 0.9


@pytest.mark.parametrize("seq_len", [16, 700])
def test_every_position_can_be_entered(tmp_path, seq_len):
    module = generated(tmp_path, "xy", seq_len=seq_len)
    module.setup("fit")
    substream = module._substreams[1]
    items = list(islice(substream.windows(), 300 * 16 // seq_len * 2 + 20))
    windows = [window.tolist() for window, _ in items]
    for index in range(0, len(items) - 5, 7):
        torch.save(items[index][1], tmp_path / "state.pt")
        entered = substream.windows(torch.load(tmp_path / "state.pt", weights_only=True))
        assert [window.tolist() for window, _ in islice(entered, 5)] == windows[index + 1 : index + 6]


def write_source(folder, kind):
    """Two files of a kind, of a hundred and more documents each; what names them."""
    for number in range(2):
        texts = documents(150, f"{number}.", seed=number)
        path = folder / f"part{number}"
        if kind == "parquet":
            rows = datasets.Dataset.from_dict({"body": texts, "n": list(range(150))})
            rows.to_parquet(f"{path}.parquet", batch_size=40)
        elif kind == "txt":
            path.with_suffix(".txt").write_text("\n\n".join(texts * 3))
        else:
            write_jsonl(path.with_suffix(".jsonl"), texts, "body")
            if kind == "jsonl.gz":
                content = path.with_suffix(".jsonl").read_bytes()
                Path(f"{path}.jsonl.gz").write_bytes(gzip.compress(content))
    return Corpus(str(folder / f"part*.{kind}"), text_field="body", streaming=True)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
def test_every_kind_of_file_can_be_entered(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "_PIECE", 1000)
    module = TinyData(corpora=[write_source(tmp_path, kind)], seq_len=64, held_out_fraction=0.1)
    module.setup("fit")
    substream = module._substreams[-1]
    assert (len(module._substreams) > 1) == (kind == "jsonl")
    ends = len(list(substream.readers[0].once()))
    items = list(islice(substream.windows(), 8 + ends * 3 // 2))
    for index in {*range(0, len(items) - 3, max(1, len(items) // 20)), ends - 2, ends - 1, ends}:
        entered = [window.tolist() for window, _ in islice(substream.windows(items[index][1]), 3)]
        assert entered == [window.tolist() for window, _ in items[index + 1 : index + 4]]


def test_a_position_holds_less_than_a_window_and_little_else(tmp_path):
    module = generated(tmp_path, "xy")
    module.setup("fit")
    for _, position in islice(module._substreams[0].windows(), 300):
        assert set(position) == {"windows", "corpora"}
        for place in filter(None, position["corpora"]):
            numbers = [value for name, value in place.items() if name != "carry"]
            assert all(type(number) is int for number in numbers)
            carry = place["carry"]
            assert carry is None or (carry.dtype == torch.int32 and carry.untyped_storage().nbytes() < 16 * 4)


def test_text_is_read_no_sooner_than_it_is_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Generated, "shards", 400)
    module = generated(tmp_path)
    READ.clear()
    module.windows("train", 8 * module.batch_size)  # a batch of each substream
    substreams = {int(text.split(".")[0].removeprefix("x")) // 50 for text in READ}
    assert substreams == set(range(8))
    # Chunks of 64 documents, each of which ends with a shard of six; the first substream is tried beforehand.
    assert len(READ) <= 9 * 66 < 400 * 6 / 4


def test_only_the_text_around_the_place_is_read_again(tmp_path):
    whole = generated(tmp_path)
    whole.setup("fit")
    substream = whole._substreams[0]
    reader = substream.windows()
    for _ in range(150):
        _, position = next(reader)
    place = position["corpora"][0]
    assert place["shard"] >= 3
    READ.clear()
    next(substream.windows(position))
    before = [text for number in range(place["shard"]) for text in shard_texts("x", number)]
    assert not set(READ) & set(before)
    assert len(READ) <= 64


OTHERS = [(1, 1, "x"), (1, 3, "xy"), (2, 1, "x")]


@pytest.mark.parametrize(
    ("workers", "accumulate", "marks"),
    [
        *((0, 1, "x"), (0, 3, "xy"), (2, 3, "xy")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_interrupted_anywhere_equals_uninterrupted(tmp_path, workers, accumulate, marks):
    def module(num_workers):
        return generated(tmp_path, marks, num_workers=num_workers)

    steps, options = 12, {"accumulate": accumulate, "val_check_interval": 5, "check_val_every_n_epoch": None}
    whole, _ = fit(module(0), tmp_path / "whole", 1, steps, **options)
    assert whole.seen == batches(module(0), steps * accumulate)
    folder = tmp_path / "whole"
    for cut in (1, 6, 11):
        resumed, _ = fit(
            module(workers), tmp_path / f"cut{cut}", 1, steps, folder / f"step={cut}.ckpt", **options
        )
        assert whole.seen[: cut * accumulate] + resumed.seen == whole.seen
        assert resumed.validated == 2 * (steps * accumulate // 5 - cut * accumulate // 5)
    twice, _ = fit(
        module(workers), tmp_path / "twice", 1, steps, tmp_path / "cut1" / "step=8.ckpt", **options
    )
    assert whole.seen[: 8 * accumulate] + twice.seen == whole.seen
    assert twice.embedding.weight.tolist() == whole.embedding.weight.tolist()


def batches(module, count):
    """The first batches of training as nested lists."""
    windows = module.windows("train", count * module.batch_size).tolist()
    return [windows[i : i + module.batch_size] for i in range(0, len(windows), module.batch_size)]


class StopAfter(Callback):
    """Saves and stops between two optimizer steps."""

    def __init__(self, batch, path):
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)


def test_micro_batches_of_an_unfinished_step_are_not_counted(tmp_path):
    saved = tmp_path / "between.ckpt"
    fit(generated(tmp_path), tmp_path / "a", 1, 4, accumulate=3, callbacks=[StopAfter(8, saved)])
    state = torch.load(saved, weights_only=True)["Generated"]
    assert state["batches"] == 6
    module = generated(tmp_path)
    module.setup("fit")
    counted = {substream: position["windows"] // 2 for substream, position in state["positions"].items()}
    assert counted == {0: 2, 1: 2, 2: 1, 3: 1}


def test_several_epochs_go_on_where_the_one_before_ended(tmp_path):
    options = {"max_epochs": 3, "limit_train_batches": 5}
    seen = fit(generated(tmp_path), tmp_path / "a", 1, 100, **options)[0].seen
    assert seen == batches(generated(tmp_path), 15)


class Witness(Recorder):
    """Leaves what each rank has seen in a file; forked ranks can't hand it over otherwise."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_end(self):
        (self.folder / f"rank{self.global_rank}.json").write_text(json.dumps(self.seen))


def on_ranks(tmp_path, name, ranks, steps, resume=None, workers=0):
    """The batches that a number of ranks see, in the order of the whole run."""
    folder = tmp_path / name
    folder.mkdir()
    options = {"devices": ranks, "strategy": "ddp_fork"} if ranks > 1 else {}
    module = generated(tmp_path, "xy", num_workers=workers)
    fit(module, folder, 3, steps, resume, accumulate=2, model=Witness(folder), **options)
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return list(chain.from_iterable(zip(*seen, strict=True)))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_ranks_may_change_between_interruption_and_resumption(tmp_path, before, after):
    start = on_ranks(tmp_path, "start", before, 3)
    assert len(start) == 6 * before
    rest = on_ranks(tmp_path, "rest", after, 8, tmp_path / "start" / "step=3.ckpt", workers=after - 1)
    assert len(rest) == 10 * after
    expected = generated(tmp_path, "xy")
    assert start + rest == batches(expected, 6 * before + 10 * after)


CHANGES = {
    "data.tokenizer": {"tokenizer": "merging"},
    "data.seq_len": {"seq_len": 8},
    "data.seed": {"seed": 1},
    "data.corpora": {"corpora": [Corpus("x", 1.0, streaming=True), Corpus("y", 2.0, streaming=True)]},
    "data.held_out_fraction": {"val_corpora": None, "held_out_fraction": 0.3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_place_in_other_text_is_not_taken(tmp_path, caplog, name):
    fit(generated(tmp_path, "xy"), tmp_path / "a", 3, 3)

    def changed():
        return generated(tmp_path, "xy", **CHANGES[name])

    with caplog.at_level("INFO", "lightning.pytorch"):
        model, _ = fit(changed(), tmp_path / "b", 3, 6, tmp_path / "a" / "step=3.ckpt")
    (line,) = (record.message for record in caplog.records if "streamed text" in record.message)
    assert "from its beginning" in line
    assert re.findall(r"data\.\w+", line) == [name]
    assert model.seen == batches(changed(), 3)


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_lines_are_read_once_wherever_files_are_cut(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "_PIECE", size)
    texts = [documents(20, mark) for mark in "ab"]
    paths = [tmp_path / f"{i}.jsonl" for i in range(2)]
    for path, part in zip(paths, texts, strict=True):
        write_jsonl(path, part)
    rest = tmp_path / "2.jsonl"
    rest.write_bytes(b'\xef\xbb\xbf{"text": "last"}\n\n{"other": 1}')
    pieces = [piece for path in [*paths, rest] for piece in files.cut_file(path, "text")]
    assert len(pieces) == 3 if size == 10**6 else len(pieces) > 20
    read = [
        row["text"] for piece in pieces for row in files.file_documents([piece], "text", Corpus("c").document)
    ]
    assert read == [*texts[0], *texts[1], "last", None]
