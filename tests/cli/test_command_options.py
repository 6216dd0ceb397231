"""Command lines made of dataclasses: what each kind of field takes, and what is said of mistakes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest

from helpers.lab import run
from roi_lightning.cli import arguments
from roi_lightning.cli.commands import COMMANDS, CONFIGURED
from roi_lightning.cli.options import parse_options


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base.

    Attributes:
        windows: How many, 100 % of them.
        text: A file
            of text.
    """

    windows: int = 4
    text: Path | str | None = None


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    """Do something.

    Attributes:
        models: Some.
        out: Where to.
        force: Whether.
        globs: Which.
        dtype: Cast.
        share: Of all.
    """

    models: list[str] = field(kw_only=False)
    out: Path
    force: bool = False
    globs: Sequence[str] = ("*",)
    dtype: Literal["a", "b"] | None = None
    share: float | None = None


def parse(*argv):
    return parse_options(Options, "thing", argv)


def test_every_kind_of_field():
    typed = ("x", "y", "--out=o", "--force", "--globs", "a", "b", "--dtype", "b")
    found = parse(*typed, "--share", "0.5", "--windows", "7", "--text", "t")
    assert found == Options(
        models=["x", "y"],
        out=Path("o"),
        force=True,
        globs=["a", "b"],
        dtype="b",
        share=0.5,
        windows=7,
        text=Path("t"),
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["x"], "the following arguments are required: --out"),
        (["--out", "o"], "the following arguments are required: models"),
        (["x", "--out", "o", "--windows", "few"], "Parser key \"windows\": Expected a <class 'int'>"),
        (["x", "--out", "o", "--dtype", "c"], 'Parser key "dtype": '),
        (["x", "--out", "o", "--glob", "g"], "unrecognized arguments: --glob g; did you mean --globs?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {says}")
    assert remedy == "try: roi-lightning thing --help"


def test_the_help_is_the_docstrings_and_the_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("Do something.", "models [models ...]", "How many, 100 % of them. (type: int, default: 4)"):
        assert part in shown
    for part in (
        "A file of text.",
        "--globs GLOBS [GLOBS ...] Which.",
        "--dtype DTYPE Cast. (type: Optional[Literal['a', 'b']]",
        "--force Whether.",
    ):
        assert part in shown


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - CONFIGURED))
def test_every_command_describes_every_option(name, capsys):
    options = fields(getattr(arguments, f"{name.title()}Options"))
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"--{field.name}" in shown for field in options if field.kw_only)
