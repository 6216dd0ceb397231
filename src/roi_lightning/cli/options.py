"""Command lines from dataclasses: a field is an option, its entry of the docstring the help."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import docstring_parser
from typing_extensions import override

T = TypeVar("T")
_METAVARS: Final = {int: "N", float: "X", Path: "PATH"}


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
    parser = _Parser(prog=f"roi-lightning {command}", argument_default=argparse.SUPPRESS)
    described = [docstring_parser.parse(base.__doc__ or "") for base in reversed(kind.__mro__)]
    parser.description = described[-1].description
    texts = {entry.arg_name: entry.description or "" for doc in described for entry in doc.params}
    hints = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        name = f"--{field.name}" if field.kw_only else field.name
        parser.add_argument(name, **_keywords(field, hints[field.name], texts[field.name]))
    return kind(**vars(parser.parse_args(argv)))


class _Parser(argparse.ArgumentParser):
    """A parser that states an error in a line."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\ntry: {self.prog} --help\n")


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
        metavar = _METAVARS.get(kind, metavar)
    return keywords | {"type": kind, "metavar": metavar}


def _default(field: "Field[Any]") -> str:
    value = () if field.default is MISSING else field.default
    if value is None or value is False or value == ():
        return ""
    return f" (default: {' '.join(value) if isinstance(value, tuple) else value})"
