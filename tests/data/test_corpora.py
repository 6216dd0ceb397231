import bz2
import gzip
import io
import json
import lzma
import random
import sys
import sysconfig
from types import SimpleNamespace

import datasets
import pytest

from roi_lightning.data.corpora import Corpus, load_documents
from roi_lightning.data.files import cut_passages, zstd
from roi_lightning.errors import UserError

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


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_glob_and_text_field(tmp_path, streaming):
    for i, row in enumerate(ROWS):
        datasets.Dataset.from_dict({"body": [row], "n": [i]}).to_parquet(tmp_path / f"part-{i}.parquet")
    read = texts(
        Corpus(str(tmp_path / "part-*.parquet"), text_field="body", streaming=streaming), tmp_path / "c"
    )
    assert read == ROWS


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "a.txt"
    for content in ("first", "second one"):
        path.write_text(content)
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


def test_bad_files(tmp_path):
    (tmp_path / "a.csv").write_text("text\n1\n")
    (tmp_path / "numbers.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "b.txt").write_text("b")
    cases = {
        "a.csv": "name of a table.*name it .txt",
        "numbers.jsonl": "no column 'text'; set text_field to one of: n",
        "latin.txt": "can't decode byte 0xe9",
        "[bn]*.*": "mixes plain text and tables",
        "": "is a folder; name its files",
        "ca*": "is a folder",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message) as raised:
            load_documents(Corpus(f"{tmp_path}/{name}"), str(tmp_path / "cache"))
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"'n' of .* is not text"):
        load_documents(Corpus(f"{tmp_path}/numbers.jsonl", text_field="n"), str(tmp_path / "cache"))
