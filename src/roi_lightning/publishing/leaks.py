"""Is there a folder of this machine in what is to be published?"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from roi_lightning.errors import UserError

_TEXTS: Final = (".json", ".md", ".jinja", ".txt", ".py", ".yaml", "")
# Words of the language, in which any path may occur.
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")


def check_no_folders(directory: Path, names: Iterable[str], others: Iterable[Path]) -> None:
    """Refuse files that name a folder of the person who publishes.

    Args:
        directory: Where the files are.
        names: The files, relative to it.
        others: Folders to look for besides those of the user and the process.

    Raises:
        UserError: Naming the first file and folder.
    """
    folders = {str(folder) for folder in _folders(others)}
    for name in names:
        path = Path(name)
        if path.suffix in _TEXTS and path.name not in _VOCABULARIES:
            text = (directory / name).read_text(encoding="utf-8", errors="replace")
            if found := next((folder for folder in folders if f"{folder}/" in text), None):
                raise UserError(
                    f"{name!r} names a folder of this machine, {found!r}; take that out of the base model's files "
                    "and make the directory again"
                )


def _folders(others: Iterable[Path]) -> Iterator[Path]:
    for folder in (Path.home(), Path.cwd(), *others):
        yield from (each for each in (folder.absolute(), folder.resolve()) if len(each.parts) > 1)
