"""`benchmarks/stream.py` in short: not how fast text made on the fly is, but that it is entered where it was left."""

import json
from itertools import islice

import pytest

from benchmarks import stream
from tiny_models import tiny_llama

SHARDS = 32


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_SHARD", 10)
    model = tiny_llama(tmp_path / "model")
    return {"tokenizer": str(model), "seq_len": 256, "batch_size": 2, "val_windows": 3}


def module(options, trainer, state=None):
    data = stream.GeneratedText(SHARDS * 10, **options)
    data.trainer = trainer
    data.setup("fit")
    if state is not None:
        data.load_state_dict(state)
    return data


def take(data, trainer, count):
    return [batch["input_ids"].tolist() for batch in islice(stream.batches(data, trainer), count)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_generated_text_is_entered_where_it_was_left(options, ranks):
    trainer = stream.Progress(ranks)
    data = module(options, trainer)
    whole = take(data, stream.Progress(ranks), 30)
    assert len(set(map(str, whole))) == 30
    data = module(options, trainer)
    assert take(data, trainer, 13) == whole[:13]
    state = data.state_dict()
    assert state["batches"] == 13 * ranks
    assert take(module(options, trainer, state), trainer, 17) == whole[13:]


def test_the_middle_is_the_middle_of_every_substream(options):
    trainer = stream.Progress(1)
    data = module(options, trainer)
    take(data, trainer, 8)
    state = stream.in_the_middle(data.state_dict(), len(data._substreams), SHARDS * 10)
    places = [position["corpora"][0]["shard"] for position in state["positions"].values()]
    assert places == [4, 4, 4, 4]
    begun = take(module(options, trainer, state), trainer, 4)
    assert not {str(batch) for batch in begun} & {str(batch) for batch in take(data, stream.Progress(1), 30)}


def test_the_table_and_the_json(options, tmp_path, monkeypatch, capsys):
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--documents", str(SHARDS * 10), "--read", "20", "--json", str(tmp_path / "f.json")]
    monkeypatch.setattr("sys.argv", ["stream.py", *words, "--held_out_fraction", "0.1"])
    stream.main()
    assert "320 documents, 0 workers, rank 0 of 1" in capsys.readouterr().out
    result = json.loads((tmp_path / "f.json").read_text())
    assert result["fresh"].keys() == result["resumed"].keys()
    assert result["fresh"]["tokens"] >= 20 * stream._WORDS
    assert result["options"]["documents"] == SHARDS * 10
