"""What several models make of the same prompts: on a terminal, as plain text and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from roi_lightning.utils.tables import standard_output

_COLUMN: Final = 36  # characters in which a text can be read


@dataclass(frozen=True)
class SideBySide:
    """One prompt and its continuations.

    Attributes:
        prompt: As text.
        source: Where it comes from.
        expected: How the text went on; None where nobody knows.
        answers: By model.
    """

    prompt: str
    source: Literal["given", "held-out text"] = "given"
    expected: str | None = None
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, str]:
        """The answers, behind how the text went on if that is known."""
        return ({} if self.expected is None else {"the text itself": self.expected}) | self.answers


def print_side_by_side(
    items: Sequence[SideBySide], notes: Mapping[str, str], console: Console | None = None
) -> None:
    """Print prompts and continuations: in columns on a wide terminal, in panels on a narrow one, else as plain text.

    Args:
        items: One for each prompt.
        notes: What to say of a model behind its name.
        console: Where to; standard output if left out.
    """
    console = console or standard_output()
    for number, item in enumerate(items, 1):
        heads = {name: f"{name}  {notes.get(name, '')}".rstrip() for name in item.columns}
        if not console.is_terminal:
            console.print(Text(_plain(number, item, heads)), soft_wrap=True)
            continue
        console.print(Text(f"\nprompt {number} of {len(items)}", "bold"))
        console.print(Text(item.prompt, "italic"))
        if console.width >= _COLUMN * len(heads):
            table = Table(expand=True, show_lines=True)
            for head in heads.values():
                table.add_column(Text(head), ratio=1, overflow="fold")
            table.add_row(*map(Text, item.columns.values()))
            console.print(table)
        else:
            for name, text in item.columns.items():
                console.print(Panel(Text(text), title=Text(heads[name]), title_align="left"))


def _plain(number: int, item: SideBySide, heads: Mapping[str, str]) -> str:
    parts = [f"=== prompt {number}\n{item.prompt}"]
    parts += [f"--- {heads[name]}\n{text}" for name, text in item.columns.items()]
    return "\n".join([*parts, ""])


def as_markdown(items: Sequence[SideBySide]) -> str:
    """Prompts and continuations as Markdown, each text as it stands."""
    parts = []
    for number, item in enumerate(items, 1):
        parts += [f"### Prompt {number} ({item.source})", _fenced(item.prompt)]
        for name, text in item.columns.items():
            parts += [f"**{name}**", _fenced(text)]
    return "\n\n".join([*parts, ""])


def _fenced(text: str) -> str:
    """A block that shows a text literally, whatever it contains."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
