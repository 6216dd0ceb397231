"""Prints the page of all commands, which is their help; it becomes part of the site, see site_hooks.py."""

import os
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Final

from roi_lightning.__main__ import main
from roi_lightning.cli.commands import COMMANDS
from roi_lightning.utils.entry_points import added

_WIDTH: Final = "100"  # of the texts, in characters
_HEAD: Final = """# Commands and their options

`roi-lightning` and `python -m roi_lightning` are the same program; dashes and underscores both work in options.
"""


def page() -> str:
    """The page, in Markdown."""
    os.environ["COLUMNS"] = _WIDTH
    names = [*COMMANDS, *sorted(added("commands"))]
    return _HEAD + "".join(f"\n## {name}\n\n```text\n{_help(name)}```\n" for name in names)


def _help(command: str) -> str:
    with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
        main([command, "--help_all" if command == "fit" else "--help"])
    return shown.getvalue()


if __name__ == "__main__":
    sys.stdout.write(page())
