"""Every table of figures against its record: the JSON that a run wrote, or what was copied from what it printed."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
PAGES = [RESULTS / "../../README.md", RESULTS / "../../docs/results.md", *sorted(RESULTS.glob("*.md"))]
SCALES = (1, 100, 1e3, 1e-6, 1e-9, 2**-20, 2**-30)  # as it is, percent, milliseconds, MB, GB, MiB, GiB
FIGURE = re.compile(r"\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+")


def tables(page):
    """Head and rows of every table that has figures."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line.replace("**", "")[1:-1].split("|") for line in block.splitlines()]
        head, _, *rows = [[cell.strip() for cell in line] for line in lines]
        if "--:" in block or FIGURE.search(block):
            yield head, rows


def value(cell):
    plain = cell.replace(",", "")
    return float(plain) if re.fullmatch(r"-?\d+(\.\d+)?(e-\d+)?", plain) else cell


@cache
def measured(file):
    """All numbers of `FILE`, or of what lies in it at `FILE#KEY/KEY`, in every unit."""
    name, _, keys = file.partition("#")
    node = json.loads((RESULTS / name).read_text())
    for key in filter(None, keys.split("/")):
        node = node[int(key) if isinstance(node, list) else key]
    found = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?", json.dumps(node))
    return np.multiply.outer([float(number.replace(",", "")) for number in found], SCALES)


def is_rounded(figure, files):
    error = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
    return any(np.abs(measured(file) - value(figure)).min() <= error for file in files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_table_says_what_was_recorded(page):
    record = json.loads((RESULTS / f"records/{page.stem}.json").read_text())
    for (head, rows), kept in zip(tables(page), record["tables"], strict=True):
        assert kept.get("model", record["model"]) in head[0], head
        if not kept.get("json") or "rows" in kept:
            assert [head, *([value(x) for x in row] for row in rows)] == [kept["columns"], *kept["rows"]]
        not_measured, files = {head[0], *kept.get("derived", [])}, kept.get("json", [])
        for row, of_row in zip(rows, files * (len(rows) // len(files)), strict=True) if files else ():
            cells = [cell for column, cell in zip(head, row, strict=True) if column not in not_measured]
            assert not [x for x in FIGURE.findall(" ".join(cells)) if of_row and not is_rounded(x, of_row)]
