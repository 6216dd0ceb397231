"""What other packages and `contrib` add by entry points: classes, commands, and formats of directories."""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, TypeVar

from roi_lightning.errors import UserError, brief, did_you_mean, reason

Group = Literal["classes", "commands", "formats"]
_T = TypeVar("_T")
_WORD: Final = re.compile(r"\w+")


@cache
def added(group: Group) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, looked for once in a process; none of them is imported."""
    return {point.name: point for point in entry_points(group=f"roi_lightning.{group}")}


def load(point: EntryPoint) -> Any:
    """Import what an entry point names.

    Raises:
        UserError: If it can't be imported.
    """
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{point.name!r} is registered as {point.value!r}, which can't be imported ({reason(error)}); "
            "install its package again"
        ) from error


def load_named_classes(text: str) -> None:
    """Import every registered class that a text names, so that jsonargparse knows it by its short name."""
    words = set(_WORD.findall(text))
    for name, point in added("classes").items():
        if name in words:
            load(point)


def named(kind: type[_T], value: object, option: str, known: Iterable[str]) -> _T:
    """An object, which may be named as on the command line, or by `class_path` and `init_args` of a mapping."""
    if isinstance(value, kind):
        return value
    from jsonargparse import ArgumentError, ArgumentParser  # which `roi-lightning --help` does without

    text = value if isinstance(value, str) else json.dumps(value, default=str)
    load_named_classes(text)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        made: _T = parser.instantiate_classes(parser.parse_args([f"--value={text}"])).value
    except (ArgumentError, TypeError, ValueError) as error:
        # The first line names the option.
        said = brief(str(error).partition("\n")[2] or str(error))
        raise UserError(
            f"{option} {text!r} can't be made: {said}; choose among {', '.join(known)} or give the class path of a "
            f"{kind.__name__}{did_you_mean(text, known)}"
        ) from error
    return made


def summary(point: EntryPoint) -> str:
    """What the first line of a module's docstring says behind its usage; the module is read, not imported."""
    spec: ModuleSpec | None = None
    name = ""
    for part in point.module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, spec.submodule_search_locations if spec else None)
        if spec is None:
            return ""
    source = spec.loader.get_source(name) if spec else ""  # type: ignore[union-attr]
    text = ast.get_docstring(ast.parse(source or "")) or ""
    return text.partition("\n")[0].rpartition("`: ")[2].rstrip(".")
