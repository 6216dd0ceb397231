"""`roi-lightning` and `python -m roi_lightning`: one entry for all commands."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from roi_lightning.cli import arguments
from roi_lightning.cli.commands import COMMANDS, CONFIGURED, GROUPS
from roi_lightning.cli.options import parse_options
from roi_lightning.cli.stored_help import answer
from roi_lightning.errors import UserError, brief, did_you_mean, reason
from roi_lightning.utils.entry_points import added, load, summary

if TYPE_CHECKING:
    from roi_lightning.cli.lightning import RoICLI

# What the system or an encoding refuses, wherever that happens; a mistake of ours is none of these.
OF_THE_SYSTEM: Final = (OSError, UnicodeError, RecursionError, MemoryError)


class Output(io.FileIO):
    """A stream of the process, which drops what nobody reads any more."""

    @override
    def write(self, data: Any, /) -> int:
        with suppress(BrokenPipeError):
            return super().write(data)
        return len(data)


def main(argv: Sequence[str] | None = None, cli: "type[RoICLI] | None" = None) -> int:
    """Run one command.

    Args:
        argv: The command and its arguments; the process's own if left out.
        cli: A class of yours that reads the configurations of `fit`, `validate` and `export`.

    Returns:
        The exit status: 0 for success, 1 for a failure, 2 for a wrong command line.
    """
    if argv is None:
        _open_streams()
    args = [_underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    if args[:1] == ["--version"]:
        sys.stdout.write(_versions())
        return 0
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0 if args else 2
    try:
        if argv is None:
            # Class paths may name files of the working folder (where jsonargparse is not while it reads a
            # configuration); last, so that none stands in for a library.
            sys.path.append(str(Path.cwd()))
        return _dispatch(args, cli)
    except UserError as error:
        sys.stderr.write(f"error: {brief(str(error))}\n")
        return 1
    except OF_THE_SYSTEM as error:
        given = f" in {error.object[:80]!r}" if hasattr(error, "object") else ""
        sys.stderr.write(f"error: {reason(error)}{given}; check the path, disk or text, or give another\n")
        return 1
    except (KeyboardInterrupt, SystemExit) as end:
        if KeyboardInterrupt not in (type(end), type(end.__context__)):  # of which Lightning makes status 1
            raise
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        if argv is None:  # another Ctrl-C would show what Python was tidying up
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _open_streams() -> None:
    """Have output go on in any encoding, and when nobody reads it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)  # None where it was closed
        buffer = io.BufferedWriter(Output(os.dup(stream.fileno()) if stream else os.devnull, "w"))
        encoding = stream.encoding if stream else None
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True))


def _dispatch(args: list[str], cli: "type[RoICLI] | None") -> int:
    command, rest = args[0], args[1:]
    # What runs a command takes seconds to import: what is typed is looked at before.
    if command in CONFIGURED:
        if cli is None and (status := answer(command, rest)) is not None:
            return status
        if command == "plan":
            import_module("roi_lightning.cli.plan").main(rest)
        else:
            import_module("roi_lightning.cli.lightning").run(args, cli)
        return 0
    if command in COMMANDS:
        options = parse_options(getattr(arguments, f"{command.title()}Options"), command, rest)
        return int(import_module(f"roi_lightning.cli.{command}").main(options) or 0)
    more = added("commands")
    if command in more:
        return int(load(more[command])(rest))
    known = [*COMMANDS, *more]
    near = did_you_mean("fit" if command in ("train", "learn") else command, known)
    meant = near or f"; the commands are {', '.join(known)}"
    sys.stderr.write(f"error: no command {command!r}{meant}\n")
    return 2


def _underscored(word: str) -> str:
    """An argument whose option, if it is one, is written with underscores."""
    option, equals, value = word.partition("=")
    return f"--{option[2:].replace('-', '_')}{equals}{value}" if option.startswith("--") else word


def _versions() -> str:
    names = ("roi-lightning", "torch", "transformers", "lightning")
    return "\n".join([*(f"{name} {version(name)}" for name in names), f"Python {python_version()}", ""])


def _overview() -> str:
    lines = [
        "usage: roi-lightning COMMAND ...      (or: python -m roi_lightning COMMAND ...)",
        "",
        "Learn N:M sparsity masks for language models.",
        "",
    ]
    more = {name: summary(point) for name, point in sorted(added("commands").items())}
    for title, commands in (GROUPS | {"---\nbeside the core": more}).items():
        lines += [f"{title}:", *(f"  {name:<10} {text}" for name, text in commands.items()), ""]
    lines += [
        "Each takes --help; --version says what is installed.",
        "A first run: roi-lightning fit --config quickstart.yaml",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder
    sys.exit(main())
