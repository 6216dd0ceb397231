"""Calibration and evaluation text that can't be used, read whole and streamed."""

import bz2
import gzip
import io
import json
import lzma
import random

import pyarrow
import pytest
from datasets.arrow_writer import ArrowWriter
from pyarrow import parquet

from helpers.refusals import assert_refused, cut, make_bench, rows, text
from roi_lightning.data.files import zstd

bench = pytest.fixture(make_bench)
# Hardly compressible, so that the first half of a packed file holds text.
LONG = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz \n", k=60_000))
ROWS = "".join(json.dumps({"text": line}) + "\n" for line in LONG.splitlines())
PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}


def fit(bench, corpus):
    return ["fit", *bench.lean("--data.corpora", corpus)]


def stream(bench, corpus):
    return fit(bench, f"{{source: {str(corpus)!r}, streaming: true}}")


def prune(bench, corpus):
    words = ["--method", "wanda", "--windows", "2", "--seq_len", "32", "--out", "out"]
    return ["prune", bench.model, "--corpora", corpus, *words]


def evaluate(bench, file):
    return ["evaluate", bench.model, "--text", file, "--seq_len", "32", "--json", "out.json"]


def uncached(bench, corpus):
    return [*fit(bench, corpus), "--data.cache_dir", "/dev/null/c"]


def packed(kind, suffix, change, content=LONG):
    return text(f"c.{suffix}.{kind}", change(PACK[kind](content.encode())))


def tables_and_text(bench):
    bench.write("b.txt", LONG)
    bench.write("b.jsonl", ROWS)
    return "b.*"


parquet.write_table(pyarrow.table({"text": []}), EMPTY := io.BytesIO())
NOISE = bytes(range(256)) * 40
TABLE = {
    "a hub id, offline": (lambda bench: "nobody/nothing", fit, "cannot read 'nobody/nothing'"),
    "neither file nor hub id": (lambda bench: "a/b/c", prune, "unknown corpus 'a/b/c'"),
    "a text for a name": (lambda bench: "river stone " * 25, prune, "unknown corpus 'river stone"),
    "a text for a name, measured": (
        lambda bench: "river stone " * 25,
        evaluate,
        "unknown corpus 'river stone",
    ),
    "nobody's folder": (lambda bench: "~no_such_user/a.txt", prune, "~no_such_user/a.txt': no file matches"),
    "UTF-16": (text("c.txt", LONG.encode("utf-16")), prune, r"c\.txt.*; convert it to UTF-8"),
    "UTF-16 without mark": (
        text("c.raw", LONG.encode("utf-16-le")),
        evaluate,
        r"c\.raw.*; convert it to UTF-8",
    ),
    "a table in text": (text("c.csv", "n,text\n1,x\n"), evaluate, r"c\.csv' has the name of a table"),
    "a Git LFS pointer": (
        text("c.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:1f" + LONG[:99]),
        evaluate,
        r"c\.txt' is a Git LFS pointer",
    ),
    "a cache that can't be": (
        text("c.txt", LONG),
        uncached,
        "read.*c.txt.*'/dev/null/c' can be written and has room, or set",
    ),
    "tables beside text": (
        tables_and_text,
        prune,
        r"'b\.\*' holds plain text; name tables in a corpus of their own",
    ),
    "a folder": (lambda bench: bench.write("d/a.txt", LONG).parent, prune, "is a folder; name its files"),
    "an empty gz": (text("c.txt.gz", gzip.compress(b"")), prune, r"c\.txt\.gz' holds no text"),
    "a number": (lambda bench: "{source: 7}", prune, "source.*Expected a .*str.*Got value: 7"),
    "another column, streamed": (
        text("c.jsonl", ROWS.replace("text", "body")),
        stream,
        "no column 'text'.*body",
    ),
    "noise far down": (text("c.txt", LONG.encode() + NOISE), stream, r"c\.txt.*decode"),
    "a broken row far down, streamed": (
        text("c.jsonl", "".join(ROWS.splitlines(True)[:99]) + '{"text": "the ca\n' + ROWS),
        stream,
        r"c\.jsonl' .Invalid control character at: .*the ca",
    ),
    "a row that is no text far down": (
        text("c.jsonl", ROWS * 20 + '{"text": 3}\n'),
        prune,
        r"column 'text' of .*c\.jsonl' is not text: 3;",
    ),
    "an empty table": (text("c.parquet", EMPTY.getvalue()), fit, r"c\.parquet' holds no text; check"),
    "invalid UTF-8 in a row": (text("c.jsonl", ROWS.encode() + b'{"text": "\xff\xfe"}\n'), prune, "to UTF-8"),
    **{
        f"a cut {kind}, streamed": (packed(kind, "txt", cut(0.5)), stream, rf"c\.txt\.{kind}")
        for kind in PACK
    },
    # What perplexities are measured on.
    "measured: a cut gz": (
        packed("gz", "jsonl", cut(0.5), ROWS),
        evaluate,
        r"c\.jsonl\.gz' .Compressed file ended",
    ),
}


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)


def test_a_disk_that_fills_up_while_text_is_tokenised_leaves_no_cache(bench, capsys, monkeypatch):
    def full(writer, batch, **options):
        if written:  # the file has a part of the tokens
            raise OSError(28, "No space left on device")
        written.extend(batch.get("input_ids", ()))
        write(writer, batch, **options)

    corpus, write, written = bench.write("c.jsonl", ROWS), ArrowWriter.write_batch, []
    with monkeypatch.context() as patch:
        patch.setattr(ArrowWriter, "write_batch", full)
        assert_refused(
            bench, capsys, fit(bench, corpus), r"c\.jsonl' .*No space left.*'/.*' can be .* has room"
        )
    again, fresh = bench.data(corpora=str(corpus)), bench.data(corpora=str(corpus), cache_dir="fresh")
    assert again.train_tokens == fresh.train_tokens
