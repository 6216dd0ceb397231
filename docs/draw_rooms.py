"""Draws `rooms.svg`: the rooms of the package in their order, and which imports which.

python docs/draw_rooms.py
"""

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[1] / "src" / "roi_lightning"
PICTURE: Final = Path(__file__).with_name("rooms.svg")
# From below to above: a room imports only from those before it.
ORDER: Final = (
    "errors",
    "utils",
    "masks",
    "models",
    "data",
    "samplers",
    "oneshot",
    "export",
    "evaluation",
    "learning",
    "reports",
    "api",
    "cli",
    "__main__",
    "contrib",
)
_HEIGHT: Final = 34  # of a room's line, in pixels
_LEFT: Final = 96
_WIDTH: Final = 960


def room(path: Path) -> str:
    """The room that a file of the package belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file names in its import statements, its own left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("roi_lightning.")}
    return found & set(ORDER) - {room(path)}


def arrows() -> dict[str, set[str]]:
    """Which rooms every room imports from."""
    found: dict[str, set[str]] = {name: set() for name in ORDER}
    for path in sorted(PACKAGE.rglob("*.py")):
        if room(path) in found:
            found[room(path)] |= imported_rooms(path)
    return found


def needed(direct: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from others: the transitive reduction of a graph without cycles."""
    above = {name: set(direct[name]) for name in ORDER}
    for name in ORDER:  # those below are complete by now
        above[name] |= {far for near in direct[name] for far in above[near]}
    return {name: direct[name] - {far for near in direct[name] for far in above[near]} for name in ORDER}


def sentence(name: str) -> str:
    """The first sentence of a room's docstring."""
    path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def picture() -> str:
    """The SVG: rooms from top (used by all) to bottom, arcs on the left from a room to those it imports."""
    place = {name: 30 + _HEIGHT * index for index, name in enumerate(ORDER)}
    parts = [
        _arc(place[name], place[other])
        for name, others in needed(arrows()).items()
        for other in sorted(others)
    ]
    parts += [_line(name, place[name]) for name in ORDER]
    return _document(parts, height=60 + _HEIGHT * len(ORDER))


def _arc(start: int, end: int) -> str:
    left, far = _LEFT - 6, round(_LEFT - 30 - 0.36 * (start - end))
    return (
        f'<path d="M {left} {start} C {far} {start}, {far} {end}, {left - 4} {end}"'
        ' fill="none" stroke="#4c6a92" stroke-opacity="0.55" stroke-width="1.3" marker-end="url(#tip)"/>'
    )


def _line(name: str, y: int) -> str:
    return (
        f'<rect x="{_LEFT}" y="{y - 13}" width="112" height="26" rx="5" fill="#e8eef6" stroke="#4c6a92"/>'
        f'<text x="{_LEFT + 56}" y="{y + 4}" text-anchor="middle" font-weight="bold">{escape(name)}</text>'
        f'<text x="{_LEFT + 126}" y="{y + 4}">{escape(sentence(name))}</text>'
    )


def _document(parts: Iterable[str], height: int) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'font-family="sans-serif" font-size="12.5">',
            '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
            '<path d="M0,0 L6,3 L0,6 z" fill="#4c6a92"/></marker></defs>',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
