"""Finds the code blocks of README.md and docs/, says how tests treat each command, and counts them.

python docs/count_commands.py

`tests/docs/test_code_blocks.py` runs what is counted as run here. A block that can't be run has a comment before it:

    <!-- not run: needs two machines -->           the commands are still parsed where they are this package's
    <!-- tested by: tests/test_claims.py -->       another test runs it
"""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parents[1]
PROGRAM: Final = "roi-lightning"
Treatment = Literal["run", "parsed", "marked", "unknown"]
Kind = Literal["shell", "yaml", "python", "output", "unknown"]

_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("bash", "sh", "console"), "shell"),
    **dict.fromkeys(("yaml", "yml"), "yaml"),
    **dict.fromkeys(("python", "py"), "python"),
    **dict.fromkeys(("text", "bibtex", "json", "toml"), "output"),
}
# Of a block without a language, what its first word says.
_PROGRAMS: Final = (
    PROGRAM,
    "python",
    "torchrun",
    "tensorboard",
    "srun",
    "pip",
    "scripts/quickstart",
    "source",
)
_FENCE: Final = re.compile(
    r"(?:^<!-- (?P<mark>not run|tested by): (?P<note>.+?) -->\n+)?"
    r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Relative to the repository.
        line: Of its first line of content.
        kind: What it holds.
        text: The content.
        mark: The word of the comment before it, or nothing.
        note: What that comment says.
    """

    page: str
    line: int
    kind: Kind
    text: str
    mark: str
    note: str


@dataclass(frozen=True)
class Command:
    """A line of a shell block, continuations joined and comments dropped, or a whole block of another kind."""

    block: Block
    text: str

    @property
    def arguments(self) -> list[str] | None:
        """What this package's program is given, or None for another program."""
        words = shlex.split(self.text, comments=True)
        if words[0] == PROGRAM:
            return words[1:]
        return words[words.index("roi_lightning") + 1 :] if "roi_lightning" in words else None

    @property
    def treatment(self) -> Treatment:
        """How `tests/docs/test_code_blocks.py` treats it."""
        ours = self.block.kind == "shell" and self.arguments is not None
        if self.block.mark == "not run":
            return "parsed" if ours else "marked"
        if self.block.mark == "tested by" or ours or self.block.kind == "python":
            return "run"
        parsed = self.block.kind == "yaml" or self.text.startswith("tensorboard ")
        return "parsed" if parsed else "unknown"


def pages() -> list[str]:
    """README and the pages of docs/."""
    return ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    content = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(content):
        line = content.count("\n", 0, found.start("text")) + 1
        kind = _kind(found["language"], found["text"])
        yield Block(page, line, kind, found["text"], found["mark"] or "", found["note"] or "")


def commands_of(block: Block) -> list[Command]:
    """The commands of a block; none of one that shows output."""
    if block.kind == "output":
        return []
    if block.kind != "shell":
        return [Command(block, block.text)]
    lines = block.text.replace("\\\n", " ").splitlines()
    return [Command(block, line) for line in lines if line.strip() and not line.startswith("#")]


def _kind(language: str, text: str) -> Kind:
    if language:
        return _KINDS.get(language, "unknown")
    if text.lstrip().startswith(_PROGRAMS):
        return "shell"
    return "output" if re.search("[─━]", text) else "unknown"


def count() -> dict[str, Counter[Treatment]]:
    """How many commands of each page are treated how."""
    return {
        page: Counter(command.treatment for block in blocks_of(page) for command in commands_of(block))
        for page in pages()
    }


def table() -> str:
    """The counts in Markdown, with a last row for all pages."""
    columns: tuple[Treatment, ...] = ("run", "parsed", "marked", "unknown")
    rows = {page: found for page, found in count().items() if found}
    rows["all"] = sum(rows.values(), Counter())
    lines = ["| page | commands | run by a test | parsed only | marked with a reason | neither |"]
    lines.append("|---|" + "---:|" * 5)
    lines += [
        f"| {page} | {found.total()} | " + " | ".join(str(found[column]) for column in columns) + " |"
        for page, found in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
