"""Command lines from dataclasses, by jsonargparse: a field is an option, its entry of the docstring the help.

A mistake is stated in two lines, `error:` and `try:`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type
from typing_extensions import override

from roi_lightning.errors import brief, did_you_mean, user_path

PROGRAM: Final = "roi-lightning"
T = TypeVar("T")
register_type(Path, str, user_path, type_check=isinstance, fail_already_registered=False)


class LineParser(ArgumentParser):
    """A parser that states an error in a line, with the option that was perhaps meant."""

    command: ClassVar = ""  # whose help has the options, where that is not this parser's own name
    reading: ClassVar[Path | None] = None  # a configuration's file

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message, known = _plainer(message, self), self._option_string_actions
        unknown = [word for word in message.split() if word.startswith("--") and word not in known]
        near = did_you_mean(unknown[0], known) if unknown else ""
        if message.startswith("unrecognized arguments: ") and not unknown:
            near = "; put a pattern like '*.txt' in quotes, several values in a list like '[a, b]'"
        place = f"{str(self.reading)!r}: " if self.reading else ""
        sys.stderr.write(f"error: {place}{brief(message)}{near}\ntry: {self.command or self.prog} --help\n")
        self.exit(2)
        raise AssertionError("exit returned")


def _plainer(message: str, parser: ArgumentParser) -> str:
    """What the library says of a name or value that it can't take, in the user's words and with what was meant."""
    if option := re.fullmatch(r"Option '([^']*)' is not accepted", message):
        first, names = option[1].partition(".")[0], {action.dest for action in parser._actions}
        known = {"class_path", "init_args", *names, *(name.partition(".")[0] for name in names)}
        return message + did_you_mean(option[1] if first in known else first, known)
    if choice := re.search(r"Expected a typing\.Literal(\[.*\])\. Got value: (.*)", message):
        near = did_you_mean(choice[2], re.findall(r"'(.*?)'", choice[1]))
        return message.replace("a typing.Literal", "one of ") + near
    if failed := re.search(r"Problem with given class_path '.*?':\s*(.*)", message):
        return f"{message.partition('- ')[0].strip()} {failed[1]}; give a class's name, or its path as file.Class"
    if message.startswith("the following arguments are required: "):
        options = parser._option_string_actions
        return re.sub(r" (?=(\w+)(,|$))", lambda name: " --" if f"--{name[1]}" in options else " ", message)
    if unnamed := re.search(r"Expected a dot import path string: (\w+)$", message, re.MULTILINE):
        of = "roi_lightning", "lightning.pytorch", "torch.optim"
        modules = [vars(module) for name, module in sys.modules.items() if name.startswith(of)]
        types = {value for module in modules for value in module.values() if isinstance(value, type)}
        known = {kind.__name__ for kind in types if kind.__module__.startswith(of)}
        near = did_you_mean(unnamed[1], sorted(known)) or "; give a class's name or its path"
        return f"{message.partition('- ')[0].strip()} no class {unnamed[1]!r}{near}"
    return message


def parse_options(kind: type[T], command: str, argv: Sequence[str]) -> T:
    """Make a dataclass of a command line.

    A field that is keyword-only becomes the option `--name`, another one a positional argument. A bool is a flag, a
    sequence takes several values.

    Args:
        kind: The dataclass, its fields described under `Attributes:`, those of its bases in theirs.
        command: Its name, for the usage.
        argv: The arguments.

    Raises:
        SystemExit: 0 after `--help`; 2 after a line that says what is wrong.
    """
    about = docstring_parser.parse(kind.__doc__ or "").description
    parser = LineParser(prog=f"{PROGRAM} {command}", description=about, allow_abbrev=False)
    texts, hints = descriptions(*reversed(kind.__mro__)), get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        name = f"--{field.name}" if field.kw_only else field.name
        parser.add_argument(name, help=texts[field.name], **_keywords(field, hints[field.name]))
    return kind(**parser.parse_args(list(argv)).as_dict())


def descriptions(*documented: Callable[..., Any]) -> dict[str, str]:
    """What the docstrings of classes or functions say of their arguments or attributes; later ones win."""
    documents = [docstring_parser.parse(each.__doc__ or "") for each in documented]
    return {entry.arg_name: entry.description or "" for document in documents for entry in document.params}


def _keywords(field: "Field[Any]", hint: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for a field."""
    if hint is bool:
        return {"action": "store_true"}
    keywords: dict[str, Any] = {"type": hint}
    if is_list := isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Sequence):
        keywords = {"type": get_args(hint)[0], "nargs": "+"}
    if field.default is not MISSING:
        # A list, for the parser writes into it.
        keywords["default"] = list(field.default) if is_list else field.default
    elif field.kw_only:
        keywords["required"] = True
    return keywords
