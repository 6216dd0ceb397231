"""`completion SHELL`: a script that completes commands and options, for the shell's start-up file."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

from roi_lightning.cli.commands import COMMANDS, CONFIGURED
from roi_lightning.cli.options import PROGRAM, add_options, parse_options
from roi_lightning.utils.entry_points import added, summary
from roi_lightning.utils.extras import require


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a script that completes commands and options, made by shtab.

    Bash: `roi-lightning completion bash > ~/.local/share/bash-completion/completions/roi-lightning`.

    Attributes:
        shell: Which one.
    """

    shell: Literal["bash", "zsh", "tcsh"] = field(kw_only=False)


def main(argv: Sequence[str]) -> int:
    """Print the script.

    Returns:
        0.

    Raises:
        UserError: Without shtab.
    """
    options = parse_options(CompletionOptions, "completion", argv)
    require("completion", "completion")
    import shtab

    sys.stdout.write(shtab.complete(all_commands(), options.shell) + "\n")
    return 0


def all_commands() -> argparse.ArgumentParser:
    """A parser that knows every command and its options; it is for completion and documentation, not for parsing."""
    from roi_lightning.cli.run_help import fill

    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--version", action="store_true", help="what is installed")
    commands = parser.add_subparsers()
    for name, meaning in COMMANDS.items():
        own = commands.add_parser(name, help=meaning, add_help=False, conflict_handler="resolve")
        if name in CONFIGURED:
            fill(own, name, everything=True)
            continue
        module = import_module(f"roi_lightning.cli.{name}")
        own.add_argument("-h", "--help", action="store_true", help="show this")
        add_options(own, getattr(module, f"{name.capitalize()}Options"))
    for name, point in sorted(added("commands").items()):
        own = commands.add_parser(name, help=summary(point), add_help=False, conflict_handler="resolve")
        own.add_argument("-h", "--help", action="store_true", help="show this")
        add_options(own, getattr(import_module(point.module), f"{name.capitalize()}Options"))
    return parser
