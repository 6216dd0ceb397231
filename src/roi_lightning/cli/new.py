"""`new NAME`: a small project that builds on this package."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from roi_lightning.cli.config_files import shipped_configs
from roi_lightning.cli.options import parse_options
from roi_lightning.errors import UserError
from roi_lightning.utils.atomic_io import written_aside


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Make a project of your own: a learner with its training step, a schedule, a corpus, a configuration, a test.

    Attributes:
        folder: The folder to make. Its name, with underscores for dashes, names the Python package in it.
    """

    folder: Path = field(kw_only=False)


def main(argv: Sequence[str]) -> int:
    """Copy the project that is shipped, under another name, and print what to type next.

    Returns:
        0.

    Raises:
        UserError: If no package can have the name, or the folder holds anything.
    """
    folder = parse_options(NewOptions, "new", argv).folder
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} is there already; give the name of a new folder")
    package = folder.name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z](\w*[A-Za-z0-9])?", package, re.ASCII) or iskeyword(package):
        remedy = "give letters, digits and dashes, such as my-masks"
        raise UserError(f"{str(folder)!r} can't name a Python package; {remedy}")
    if package in ("configs", "tests") or getattr(find_spec(package), "origin", None):
        raise UserError(f"{str(folder)!r} would hide the module {package!r}; give another name")
    with written_aside(folder) as aside:
        made = _copy(shipped_configs().parent / "examples/project", aside, package)
    lines = [f"made {folder}:", *(f"  {name}" for name in made), "", "Next:", f"  cd {folder}"]
    lines += ["  pip install -e '.[dev]'", "  python -m pytest"]
    lines += [f"  python -m {package} fit --config configs/{package}.yaml", ""]
    sys.stdout.write("\n".join(lines))
    return 0


def _copy(template: Path, folder: Path, package: str) -> list[str]:
    """Copy a project's files, where `my_project` and `my-project` stand for its name; the names of the files."""
    made = []
    for source in sorted(template.rglob("*.*")):
        if source.is_file() and source.suffix != ".pyc":
            name, text = (
                text.replace("my_project", package).replace("my-project", package.replace("_", "-"))
                for text in (source.relative_to(template).as_posix(), source.read_text(encoding="utf-8"))
            )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
            made.append(name)
    return made
