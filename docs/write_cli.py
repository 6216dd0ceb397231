"""Write docs/cli.md anew from the options that the commands know: `python docs/write_cli.py`."""

import argparse
from pathlib import Path
from typing import Final

from roi_lightning.cli.commands import COMMANDS, CONFIGURED, sentence
from roi_lightning.cli.completion import all_commands
from roi_lightning.cli.options import PROGRAM

PAGE: Final = Path(__file__).with_name("cli.md")
_HEAD: Final = f"""# Commands and their options

Written by `docs/write_cli.py` from the commands' own help. `{PROGRAM}` and `python -m roi_lightning` are the same
program; dashes and underscores both work in options. `fit`, `validate`, `export` and `plan` take the same
configuration: its options are listed once, under `fit`.

"""
_UNTITLED: Final = ("positional arguments", "options")


def page() -> str:
    """The page, in Markdown."""
    known = _commands(all_commands())
    shared = {action.dest for action in known["fit"]._actions} - {"ckpt_path"}
    parts = []
    for name, parser in known.items():
        without = shared if name in CONFIGURED and name != "fit" else set()
        description = parser.description or (sentence(name) if name in COMMANDS else "")
        parts.append(f"## {name}\n\n{_words(description)}\n\n{_tables(parser, without)}")
        for kind, own in _commands(parser).items():
            parts.append(f"### {name} {kind}\n\n{_tables(own, set())}")
    return f"{_HEAD}{''.join(parts)}".rstrip() + "\n"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(found, {}))


def _tables(parser: argparse.ArgumentParser, without: set[str]) -> str:
    rows: dict[str, list[str]] = {}
    for group in parser._action_groups:
        title = "" if group.title in _UNTITLED else f"**{group.title}**\n\n"
        shown = (
            action for action in group._group_actions if not isinstance(action, argparse._SubParsersAction)
        )
        shown = (action for action in shown if action.dest not in without | {"help", "help_all"})
        rows.setdefault(title, []).extend(map(_row, shown))
    tables = [
        f"{title}| option | means |\n|---|---|\n" + "\n".join(found) for title, found in rows.items() if found
    ]
    return "".join(f"{table}\n\n" for table in tables)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{option}`" for option in action.option_strings)
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    taken = "" if action.nargs == 0 else f"`{action.metavar or choices or action.dest.upper()}`"
    return f"| {' '.join(filter(None, (names, taken)))} | {_words((action.help or '') % vars(action))} |"


def _words(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
