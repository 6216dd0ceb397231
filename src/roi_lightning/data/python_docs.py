"""The documentation that comes with Python, as documents."""

import ast
import importlib
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

_SMALLEST_DOCUMENT = 200  # characters; shorter docstring collections are stubs
_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_documents(library: str, version: str) -> Iterator[dict[str, str]]:
    """Yield the language reference topic by topic, then the docstrings of each module under `library`.

    Modules are parsed and never imported. `version` only tells caches of different Pythons apart.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        topics = {}
    files = sorted(Path(library).rglob("*.py"))
    modules = (file for file in files if not _NOT_LIBRARY.intersection(file.relative_to(library).parts))
    for text in chain((topics[name] for name in sorted(topics)), map(_docstrings, modules)):
        if len(text) >= _SMALLEST_DOCUMENT:
            yield {"text": text}


def _docstrings(file: Path) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's modules
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
