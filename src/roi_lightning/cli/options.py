"""Command lines from dataclasses: a field is an option, its entry of the docstring the help."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import docstring_parser
from typing_extensions import override

from roi_lightning.errors import did_you_mean

PROGRAM: Final = "roi-lightning"
T = TypeVar("T")
METAVARS: Final = {int: "N", float: "X", Path: "PATH"}


def parse_options(kind: type[T], command: str, argv: Sequence[str]) -> T:
    """Make a dataclass of a command line.

    A field that is keyword-only becomes the option `--name`, another one a positional argument. A bool is a flag, a
    sequence takes several values, a Literal has choices; of a union the first type counts.

    Args:
        kind: The dataclass, its fields described under `Attributes:`, those of its bases in theirs.
        command: Its name, for the usage.
        argv: The arguments.

    Raises:
        SystemExit: 0 after `--help`; 2 after a line that says what is wrong.
    """
    parser = LineParser(prog=f"{PROGRAM} {command}", argument_default=argparse.SUPPRESS)
    add_options(parser, kind)
    return kind(**vars(parser.parse_args(argv)))


def add_options(parser: argparse.ArgumentParser, kind: type[object]) -> None:
    """Give a parser the fields of a dataclass as options, and its description; see `parse_options`."""
    parser.description = docstring_parser.parse(kind.__doc__ or "").description
    texts, hints = described(kind), get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        name = f"--{field.name}" if field.kw_only else field.name
        parser.add_argument(name, **_keywords(field, hints[field.name], texts[field.name]))


def described(kind: type[object]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of its arguments or attributes, by name."""
    documents = [docstring_parser.parse(base.__doc__ or "") for base in reversed(kind.__mro__)]
    return {entry.arg_name: entry.description or "" for document in documents for entry in document.params}


class LineParser(argparse.ArgumentParser):
    """A parser that states an error in a line, and names the options that were perhaps meant."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {with_near_options(message, _options(self))}\ntry: {self.prog} --help\n")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser and of its commands, with their dashes."""
    below = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    parsers = [parser, *(command for commands in below for command in commands.values())]
    return [option for each in parsers for action in each._actions for option in action.option_strings]


def with_near_options(message: str, known: Sequence[str]) -> str:
    """An error of argparse, with the nearest options where it is about unknown ones.

    Args:
        message: The error.
        known: All options, with their dashes.
    """
    _, unknown, words = message.partition("unrecognized arguments: ")
    option = words.split("=")[0].split(" ")[0]
    if not unknown or not option.startswith("--"):
        return message
    return f"{message}{did_you_mean(option, known)}"


def _keywords(field: "Field[Any]", hint: Any, text: str) -> dict[str, Any]:
    """The arguments of `add_argument` for a field."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next(member for member in members if member is not NoneType)
    keywords: dict[str, Any] = {"help": " ".join(text.split()).replace("%", "%%") + _default(field)}
    if field.kw_only and field.default is field.default_factory is MISSING:
        keywords["required"] = True
    if kind is bool:
        return keywords | {"action": "store_true"}
    if get_origin(kind) is Literal:
        return keywords | {"choices": get_args(kind)}
    metavar = field.name.upper()
    if get_origin(kind) is not None:
        kind, metavar = get_args(kind)[0], metavar.removesuffix("S")
        keywords |= {"nargs": "+", "action": "extend"}
    elif field.kw_only:
        metavar = METAVARS.get(kind, metavar)
    return keywords | {"type": kind, "metavar": metavar}


def _default(field: "Field[Any]") -> str:
    value = () if field.default is MISSING else field.default
    if value is None or value is False or value == ():
        return ""
    return f" (default: {' '.join(value) if isinstance(value, tuple) else value})"
