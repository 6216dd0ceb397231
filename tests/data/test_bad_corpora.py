"""Calibration and evaluation text that can't be used, read whole and streamed."""

import bz2
import gzip
import json
import lzma
import random

import pytest
import yaml
from datasets import Dataset

from refusals import assert_refused, cut, flipped, make_bench, rows, text
from roi_lightning.data.files import zstd

bench = pytest.fixture(make_bench)
# Hardly compressible, so that the first half of a packed file holds text.
LONG = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz \n", k=60_000))
ROWS = "".join(json.dumps({"text": line}) + "\n" for line in LONG.splitlines())
PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}


def fit(bench, corpus):
    return ["fit", *bench.lean("--data.corpora", corpus)]


def stream(bench, corpus):
    return ["fit", *bench.lean("-c", bench.write("s.yaml", streamed(corpus)))]


def streamed(corpus):
    return f"data: {{corpora: [{{source: {str(corpus)!r}, streaming: true}}]}}"


def prune(bench, corpus):
    words = ["--method", "wanda", "--windows", "2", "--seq_len", "32", "--out", "out"]
    return ["prune", bench.model, "--corpora", corpus, *words]


def evaluate(bench, file):
    return ["evaluate", bench.model, "--text", file, "--seq_len", "32", "--json", "out.json"]


def tasks(bench, folder):
    return ["evaluate", bench.model, "--tasks", "arc_easy", "--task_data", folder, "--json", "out.json"]


def examples(bench, content):
    """Good questions, and a file of examples."""
    choices = {"text": ["yes", "no"], "label": ["A", "B"]}
    row = json.dumps({"question": "Is snow white?", "choices": choices, "answerKey": "A"})
    bench.write("data/arc_easy.jsonl", f"{row}\n")
    return bench.write("data/arc_easy.train.jsonl", content.replace("ROW", row)).parent


def with_examples(bench, folder):
    return [*tasks(bench, folder), "--num_fewshot", "2"]


def packed(kind, suffix, change, content=LONG):
    return text(f"c.{suffix}.{kind}", change(PACK[kind](content.encode())))


def parquet(change):
    def make(bench):
        path = bench.folder / "c.parquet"
        Dataset.from_dict({"text": [LONG] * 3}).to_parquet(path)
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def folder(bench):
    (bench.folder / "texts").mkdir()
    return bench.write("texts/a.txt", LONG).parent


def mixed(bench):
    bench.write("texts/a.txt", LONG)
    bench.write("texts/b.jsonl", ROWS)
    return "texts/*"


def empty_folder(bench):
    (bench.folder / "data").mkdir()
    return bench.folder / "data"


def chats(name, row, **options):
    """A corpus of chats, as a command line spells it."""

    def make(bench):
        path = text(name, (json.dumps(row) + "\n") * 50)(bench)
        return yaml.safe_dump(
            {"source": str(path), "messages_field": "messages"} | options, default_flow_style=True
        )

    return make


def spelled(words):
    return lambda bench: words


CHAT = {"messages": [{"role": "user", "content": "where is the cat?"}]}
NOISE = bytes(range(256)) * 40
TABLE = {
    "missing": (lambda bench: "nowhere.txt", prune, "'nowhere.txt': no file matches"),
    "missing, streamed": (lambda bench: "nowhere.txt", stream, "'nowhere.txt': no file matches"),
    "a hub id, offline": (lambda bench: "nobody/nothing", fit, "cannot load corpus 'nobody/nothing'"),
    "neither file nor hub id": (lambda bench: "a/b/c", prune, "unknown corpus 'a/b/c'"),
    "a glob of nothing": (lambda bench: "texts/*.txt", prune, "no file matches"),
    "a folder": (folder, fit, "is a folder; name its files"),
    "a folder, pruned": (folder, prune, "is a folder; name its files"),
    "mixed formats": (mixed, fit, "mix formats"),
    "an unknown format": (text("c.pdf", LONG), prune, "cannot read .*c.pdf"),
    "an empty parquet": (text("c.parquet", ""), prune, r"c\.parquet' .Parquet file size is 0"),
    "an empty json": (text("c.json", ""), prune, r"cannot load corpus .*c\.json'"),
    "an empty gz": (text("c.txt.gz", ""), prune, r"c\.txt\.gz' holds no text"),
    "only blanks": (text("c.txt", " \n\t\n" * 5000), fit, r"c\.txt.*no documents with text"),
    "only blanks, streamed": (text("c.txt", " \n\t\n" * 5000), stream, "less text than one window"),
    "only empty rows": (text("c.jsonl", '{"text": "  "}\n' * 50), prune, r"c\.jsonl.*no documents with text"),
    "only nulls": (text("c.jsonl", '{"text": null}\n' * 50), prune, r"c\.jsonl.*is not text"),
    "too short, streamed": (text("c.txt", "a cat"), stream, r"c\.txt' has less text than one window of 32"),
    "too short, pruned": (text("c.txt", "a cat"), prune, "one window needs 32"),
    "another column": (text("c.jsonl", ROWS.replace("text", "body")), prune, "no column 'text'.*body"),
    "another column, streamed": (
        text("c.jsonl", ROWS.replace("text", "body")),
        stream,
        "no column 'text'.*body",
    ),
    "numbers": (text("c.jsonl", '{"text": 3}\n' * 50), prune, "is not text"),
    "a list of numbers": (text("c.json", "[1, 2, 3]"), prune, r"column 'text' of .*c\.json' is not text"),
    "noise as text": (text("c.txt", NOISE), fit, r"c\.txt.*decode"),
    "noise as text, streamed": (text("c.txt", NOISE), stream, r"c\.txt.*decode"),
    "noise as text, pruned": (text("c.txt", NOISE), prune, r"c\.txt.*decode"),
    "noise as jsonl": (text("c.jsonl", NOISE), prune, r"cannot load corpus .*c\.jsonl'"),
    "noise as parquet": (text("c.parquet", NOISE), prune, r"c\.parquet' .Parquet magic bytes"),
    "noise far down": (text("c.txt", LONG.encode() + NOISE), stream, r"c\.txt.*decode"),
    "a broken row": (text("c.jsonl", ROWS + '{"text": "the ca'), fit, r"cannot load corpus .*c\.jsonl'"),
    "a broken row far down, streamed": (
        text("c.jsonl", "".join(ROWS.splitlines(True)[:99]) + '{"text": "the ca\n' + ROWS),
        stream,
        r"c\.jsonl' .Invalid control character",
    ),
    "a row that is no text far down": (
        text("c.jsonl", ROWS * 20 + '{"text": 3}\n'),
        prune,
        r"column 'text' of .*c\.jsonl' is not text",
    ),
    "invalid UTF-8 in a row": (text("c.jsonl", ROWS.encode() + b'{"text": "\xff\xfe"}\n'), prune, "to UTF-8"),
    **{f"a cut {kind}": (packed(kind, "txt", cut(0.5)), prune, rf"c\.txt\.{kind}") for kind in PACK},
    **{
        f"a cut {kind}, streamed": (packed(kind, "txt", cut(0.5)), stream, rf"c\.txt\.{kind}")
        for kind in PACK
    },
    **{
        f"cut rows in {kind}": (packed(kind, "jsonl", cut(0.5), ROWS), prune, rf"c\.jsonl\.{kind}")
        for kind in PACK
    },
    "a flipped gz": (packed("gz", "txt", flipped(0.5)), prune, r"c\.txt\.gz' .CRC check failed"),
    "a flipped xz": (packed("xz", "txt", flipped(0.5)), prune, r"c\.txt\.xz' .Corrupt"),
    "a flipped bz2": (packed("bz2", "txt", flipped(0.5)), prune, r"c\.txt\.bz2' .Invalid data"),
    "text by the name of a gz": (text("c.txt.gz", LONG), prune, r"c\.txt\.gz' .Not a gzipped file"),
    "text by the name of a zst": (
        text("c.txt.zst", LONG),
        prune,
        r"c\.txt\.zst' .Unable to decompress Zstandard data",
    ),
    "a cut parquet": (parquet(cut(0.5)), fit, r"c\.parquet' .Parquet magic bytes"),
    "chats: no template": (chats("c.jsonl", CHAT), prune, r"c\.jsonl' holds chats.*has no chat template"),
    "chats: text": (
        chats("c.jsonl", {"messages": "a cat"}),
        prune,
        r"c\.jsonl' has a row that is no chat, .*a cat",
    ),
    "chats: another column": (
        chats("c.jsonl", {"talk": []}),
        prune,
        "no column 'messages'.*messages_field.*talk",
    ),
    "chats: text alone": (chats("c.txt", CHAT), prune, r"c\.txt' is text without columns"),
    "chats: no such loss": (
        chats("c.jsonl", CHAT, loss_on="some"),
        prune,
        "loss_on 'some'.*set it to all or answers",
    ),
    "self: streamed": (spelled("{source: self, streaming: true}"), prune, "streaming True means nothing to"),
    "self: words": (spelled("{source: self, tokens: many}"), prune, "tokens of sampled text is 'many'; give"),
    "self: too long": (spelled("{source: self, max_tokens: 4096}"), prune, "reads at most 128 tokens"),
    "self: no such token": (spelled("{source: self, start: <x>}"), prune, "no token '<x>'; set start"),
    "self: of a file": (spelled("{source: c.txt, tokens: 9}"), prune, "tokens 9 means nothing to .*c.txt"),
    # What perplexities are measured on.
    "measured: missing": (lambda bench: "nowhere.txt", evaluate, "nowhere.txt' is no file"),
    "measured: a folder": (folder, evaluate, "is no file"),
    "measured: self": (spelled("{source: self}"), evaluate, "corpus 'self' is sampled from .* none here"),
    "measured: empty": (text("c.txt", ""), evaluate, "has 0 tokens and at least 2 are needed"),
    "measured: noise": (text("c.txt", NOISE), evaluate, r"c\.txt' can't be read as UTF-8"),
    "measured: a cut gz": (
        packed("gz", "jsonl", cut(0.5), ROWS),
        evaluate,
        r"c\.jsonl\.gz' .Compressed file ended",
    ),
    "measured: a packed text": (packed("gz", "txt", cut(1)), evaluate, r"c\.txt\.gz' can't be read as UTF-8"),
    "measured: a broken row": (
        text("c.jsonl", ROWS + '{"text": "the ca'),
        evaluate,
        r"c\.jsonl' .Unterminated",
    ),
    "measured: a cut parquet": (parquet(cut(0.5)), evaluate, r"c\.parquet' .Parquet magic bytes"),
    "tasks: no folder": (lambda bench: "nowhere", tasks, r"no file 'nowhere/arc_easy\.jsonl'"),
    "tasks: an empty folder": (empty_folder, tasks, r"no file .*data/arc_easy\.jsonl'"),
    "tasks: a broken row": (
        lambda bench: bench.write("data/arc_easy.jsonl", '{"id": ').parent,
        tasks,
        r"set up from .*arc_easy\.jsonl'.*check its fields",
    ),
    "tasks: a broken example": (
        lambda bench: examples(bench, "ROW\n{"),
        with_examples,
        r"arc_easy\.train\.jsonl'.*check its fields",
    ),
    "tasks: too few examples": (
        lambda bench: examples(bench, "ROW\n"),
        with_examples,
        r"arc_easy\.train\.jsonl'.*check its fields.*[Ss]ample",
    ),
    "tasks: other columns": (
        lambda bench: bench.write("data/arc_easy.jsonl", '{"a": 1}\n').parent,
        tasks,
        r"arc_easy\.jsonl'.*check its fields.*'question'",
    ),
    "tasks: empty": (
        lambda bench: bench.write("data/arc_easy.jsonl", "").parent,
        tasks,
        r"set up from .*arc_easy\.jsonl'.*check its fields",
    ),
}


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)
