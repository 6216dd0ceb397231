"""Articles of Wikipedia as plain text: the hundred or so that gensim's wheel holds for its tests.

    pip download --no-deps gensim==4.4.0
    python benchmarks/wikipedia_text.py gensim-4.4.0-*.whl wikipedia.jsonl

The text is CC BY-SA. Any dump of articles will do in the place of the wheel (`.xml.bz2`).
"""

import argparse
import bz2
import html
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_IN_WHEEL: Final = re.compile(r".*/enwiki-latest-pages-articles1\.xml-.*\.bz2")
_SHORTEST: Final = 1000  # characters; shorter articles are lists of links
_LAST_SECTION: Final = re.compile(
    r"\n=+ *(See also|References|Notes|External links|Further reading|Bibliography) *=+"
)
# In this order, until nothing changes: what stands in other markup is gone before it.
_MARKUP: Final = (
    (re.compile(r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<(math|gallery|table)\b.*?</\1>", re.DOTALL), ""),
    (re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}"), ""),
    (re.compile(r"\[\[(?:File|Image|Category|[a-z-]{2,12}):[^\[\]]*\]\]"), ""),
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[\w+://\S+ ?([^\[\]]*)\]"), r"\1"),
    (re.compile(r"<[^<>]*>|'{5}|'{3}|'{2}"), ""),
    (re.compile(r"^(=+) *(.*?) *\1 *$", re.MULTILINE), r"\2"),
    (re.compile(r"^[*#:;]+ *", re.MULTILINE), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
)


def main() -> None:
    """Write the articles as JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dump", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    texts = list(articles(bz2.decompress(read_dump(given.dump)).decode()))
    with given.out.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    print(f"{len(texts)} articles, {sum(map(len, texts)):,} characters: {given.out}")


def read_dump(path: Path) -> bytes:
    """The compressed dump, taken out of the wheel if it lies in one."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        (name,) = filter(_IN_WHEEL.fullmatch, wheel.namelist())
        return wheel.read(name)


def articles(xml: str) -> Iterator[str]:
    """Title and plain text of every article of a dump that is no redirect and not very short."""
    for page in re.findall(r"<page>.*?</page>", xml, re.DOTALL):
        title, source = (
            re.search(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL) for tag in ("title", "text")
        )
        if title is None or source is None or "<redirect" in page or ":" in title[1]:
            continue
        text = plain(html.unescape(source[1]))
        if len(text) >= _SHORTEST:
            yield f"{html.unescape(title[1])}\n\n{text}"


def plain(source: str) -> str:
    """An article without markup, up to its references."""
    text, before = _LAST_SECTION.split(source)[0], ""
    while text != before:
        before = text
        for markup, instead in _MARKUP:
            text = markup.sub(instead, text)
    return html.unescape(text).strip()


if __name__ == "__main__":
    main()
