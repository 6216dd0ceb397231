"""Articles of a dump against the text that a reader sees."""

import bz2
import zipfile

import pytest

from benchmarks import wikipedia_text
from benchmarks.wikipedia_text import articles, plain, read_dump

SEEN = "The oak's acorn (1707) fell far from any tree."


@pytest.mark.parametrize(
    "source",
    [
        "The '''oak''''s [[acorn|acorn]] (1707) fell far from any [[tree]].",
        "{{about|oaks|{{PAGENAME}}}}The oak's acorn (1707)<ref name=a>{{cite|x}}</ref> fell far from any tree.",
        "[[File:O.jpg|An [[oak]]]]The oak's <!-- nut -->acorn (1707) fell [http://x.org far] from any tree.",
        "The oak's acorn (1707) fell far from any tree.\n{|class=x\n|-\n|{{n|1}}\n|}\n[[Category:Oaks]]",
        "* The oak's acorn (1707) fell far <small>from</small> any tree.\n\n== See also ==\n* [[Elm]]",
    ],
)
def test_markup_is_gone_and_text_is_not(source):
    assert plain(source) == SEEN


def test_pages_that_are_no_articles_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(wikipedia_text, "_SHORTEST", 20)
    pages = [("Oak &amp; elm", SEEN), ("Talk:Oak", SEEN), ("Short", "Acorn."), ("Gone", f"{SEEN}<redirect/>")]
    xml = "".join(f"<page><title>{title}</title><text x='y'>{text}</text></page>" for title, text in pages)
    assert list(articles(xml)) == [f"Oak & elm\n\n{SEEN}"]
    dump = bz2.compress(xml.encode())
    (tmp_path / "d.bz2").write_bytes(dump)
    with zipfile.ZipFile(tmp_path / "g.whl", "w") as wheel:
        wheel.writestr("g/data/enwiki-latest-pages-articles1.xml-p1.bz2", dump)
        wheel.writestr("g/other.py", "")
    assert read_dump(tmp_path / "d.bz2") == read_dump(tmp_path / "g.whl") == dump
