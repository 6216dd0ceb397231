import bz2
import gzip
import io
import json
import lzma
import os
import random
import sys
import sysconfig
from types import SimpleNamespace

import datasets
import pytest

from roi_lightning.data.corpora import Corpus, load_documents
from roi_lightning.data.files import cut_passages, zstd

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
ROWS = [f"row {i} with an é\n" for i in range(5)]


def texts(corpus, cache):
    documents = load_documents(corpus, str(cache))
    assert list(documents.features) == ["text"]
    return [row["text"] for row in documents]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
def test_local_formats_round_trip(tmp_path, kind, compression, streaming):
    objects = [{"text": row, "n": i} for i, row in enumerate(ROWS)]
    content = {
        "txt": "".join(ROWS),
        "jsonl": "".join(json.dumps(row) + "\n" for row in objects),
        "json": json.dumps(objects),
    }[kind]
    path = tmp_path / f"words.{kind}{compression}"
    path.write_bytes(COMPRESS[compression](content.encode()))
    read = texts(Corpus(str(path), streaming=streaming), tmp_path / "cache")
    assert "".join(read) == "".join(ROWS)
    assert len(read) == (1 if kind == "txt" else len(ROWS))


def test_a_zst_of_several_frames_is_read_to_its_end(tmp_path):
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"  # a frame for other programs
    path = tmp_path / "words.txt.zst"
    path.write_bytes(skipped + skipped.join(zstd.compress(row.encode()) for row in ROWS) + skipped)
    assert "".join(texts(Corpus(str(path)), tmp_path / "cache")) == "".join(ROWS)


def lines(*rows):
    return b"\xef\xbb\xbf" + "".join(row + "\n" for row in rows).encode()


def table(body, **others):
    held = io.BytesIO()
    datasets.Dataset.from_dict({"body": [body]} | others).to_parquet(held)
    return held.getvalue()


OTHER = lines('{"body": "of another file"}')
# A source, the files that are there, and the documents that are wanted.
FILES = {
    "a mark is no text": ("a.txt", {"a.txt": lines("plain")}, ["plain\n"]),
    "JSON by another name": ("a.txt", {"a.txt": lines('{ "body": "x"}')}, ["x"]),
    "a list by another name": ("a.md", {"a.md": b'[\n {"body": "x"}]'}, ["x"]),
    "packed by no name": ("a", {"a": gzip.compress(lines('{"body": "x"}'))}, ["x"]),
    "large letters": ("A.PARQUET", {"A.PARQUET": table("x")}, ["x"]),
    "text that begins like JSON": ("a.txt", {"a.txt": b"[1] {see} below"}, ["[1] {see} below"]),
    "half a character": (
        "a.jsonl",
        {"a.jsonl": lines(r'{"body": "a \ud83d \ud83d\ude00"}')},
        ["a \ufffd 😀"],
    ),
    "columns that change": (
        "[ab].jsonl",
        {
            "a.jsonl": lines(
                '{"body": "x", "n": null, "m": []}', '{"body": "y", "n": {"k": 1}, "m": [{"t": "z"}]}'
            ),
            "b.jsonl": lines('{"n": NaN, "body": "twice", "body": "z", "o": 123456789012345678901}'),
        },
        ["x", "y", "z"],
    ),
    "tables that differ": (
        "*.parquet",
        {"a.parquet": table("x", n=[1]), "b.parquet": table("y", n=["one"], o=[{"k": None}])},
        ["x", "y"],
    ),
    "an empty file beside": ("*.jsonl", {"a.jsonl": b"\n", "b.jsonl": lines('{"body": "x"}')}, ["x"]),
    "brackets": (
        "d [v2]/p[1].jsonl",
        {"d [v2]/p[1].jsonl": lines('{"body": "x"}'), "d [v2]/p1.jsonl": OTHER},
        ["x"],
    ),
    "brackets of a table": ("q[a].parquet", {"q[a].parquet": table("x"), "qa.parquet": OTHER}, ["x"]),
    "a star": ("v*.jsonl", {"v*.jsonl": lines('{"body": "x"}'), "v2.jsonl": OTHER}, ["x"]),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", FILES)
def test_content_says_what_a_file_is_and_the_asked_column_is_read(tmp_path, case, streaming):
    source, there, wanted = FILES[case]
    for name, content in there.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)
    corpus = Corpus(f"{tmp_path}/texts/{source}", text_field="body", streaming=streaming)
    assert texts(corpus, tmp_path / "cache") == wanted


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "a.txt"
    for content in ("first", "other", "second one"):
        path.write_text(content)
        os.utime(path, (0, 0))
        assert texts(Corpus(str(path)), tmp_path / "cache") == [content]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("blank_share", [0.0, 0.2])
@pytest.mark.parametrize("width", [60, 50_000])
def test_passages_concatenate_to_the_text(newline, blank_share, width):
    draw = random.Random(0)
    lines = [
        "" if draw.random() < blank_share else "x" * draw.randint(1, width) for _ in range(2_000_000 // width)
    ]
    text = newline.join(lines)
    passages = list(cut_passages(io.StringIO(text, newline="")))
    assert "".join(passages) == text
    assert len(passages) > 20
    assert max(map(len, passages)) <= 30_000
    if blank_share and width == 60:
        assert all(passage.endswith(newline * 2) for passage in passages[:-1])
        assert max(map(len, passages)) < 12_000


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A Python of two topics and one documented module, beside some that are left out; its texts."""
    folder = tmp_path / "library"
    (folder / "json").mkdir(parents=True)
    (folder / "test").mkdir()
    told = [("Of " + name + ". ") * 12 + "So much." for name in ("a module", "a class", "its method")]
    code = '"""{}"""\nclass A:\n    """{}"""\n    def f(self):\n        """{}"""\n'.format(*told)
    for name in ("json/__init__.py", "test/test_json.py"):
        (folder / name).write_text(code)
    (folder / "broken.py").write_text(f'"""{told[0] * 9}"""\nclass\n')
    (folder / "short.py").write_text('"""So short."""\n')
    topics = {"yield": "Of generators. " * 20, "lambda": "Of functions. " * 20, "pass": "Nothing."}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", SimpleNamespace(topics=topics))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return [topics["lambda"], topics["yield"], "\n\n".join(told)]


def test_python_docs_are_topics_and_docstrings(tmp_path, library):
    assert texts(Corpus("python-docs"), tmp_path) == library
    assert texts(Corpus("python-docs", streaming=True), tmp_path) == library
    assert load_documents(Corpus("python-docs"), str(tmp_path)).cache_files
