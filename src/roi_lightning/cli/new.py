"""`new NAME`: a small project that builds on this package."""

import re
import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from roi_lightning.cli.arguments import NewOptions
from roi_lightning.cli.config_files import shipped_configs
from roi_lightning.errors import UserError
from roi_lightning.utils.atomic_io import written_aside


def main(options: NewOptions) -> None:
    """Copy the project that is shipped, under another name, and print what to type next.

    Raises:
        UserError: If no package can have the name, or the folder holds anything.
    """
    folder = options.folder
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
