"""Python sources of installed packages as JSON lines, a document for each file.

    python benchmarks/python_text.py code.jsonl networkx rich pydantic fsspec aiohttp SQLAlchemy

Name packages whose licence permits it. Tests are left out, and so are files that hold tables instead of code.
"""

import argparse
import json
import random
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

SHORTEST: Final = 1_000  # characters of a file
LONGEST: Final = 60_000


def main() -> None:
    """Write the files of every package, up to as many characters as each may have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--characters", type=int, default=300_000, help="of each package, at most")
    given = parser.parse_args()
    with given.out.open("w") as file:
        for package in given.packages:
            texts = list(first(sources(package), given.characters))
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            print(
                f"{package} {distribution(package).version}: {len(texts)} files, {sum(map(len, texts)):,} characters"
            )


def sources(package: str) -> list[str]:
    """The package's files of code, in an order that the same version repeats."""
    paths = sorted(
        str(path.locate())
        for path in distribution(package).files or ()
        if path.suffix == ".py" and "test" not in str(path)
    )
    random.Random(0).shuffle(paths)
    texts = (Path(path).read_text(encoding="utf-8") for path in paths)
    return [text for text in texts if SHORTEST <= len(text) <= LONGEST]


def first(texts: list[str], characters: int) -> Iterator[str]:
    """Texts from the beginning that have so many characters together, at most."""
    for text in texts:
        characters -= len(text)
        if characters < 0:
            return
        yield text


if __name__ == "__main__":
    main()
