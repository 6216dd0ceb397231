"""Write the directory for the hub: to a temporary path, verified, then renamed."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from roi_lightning.errors import UserError
from roi_lightning.export import check_destination
from roi_lightning.export.card_metadata import Publication, public_name, public_values
from roi_lightning.export.model_card import model_card
from roi_lightning.export.sidecar import read_sidecar, write_sidecar, written_files
from roi_lightning.export.verify import require_verified
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.models.source import SIDECAR
from roi_lightning.utils.atomic_io import written_aside
from roi_lightning.utils.progress import progress

_CARD: Final = "README.md"
_ATTRIBUTES: Final = ".gitattributes"
# The hub keeps larger files than this out of git.
_LARGE: Final = 10 * 2**20
# Keys that `write_sidecar` sets.
_HASHES: Final = ("files", "checksum")
_TEXTS: Final = (".json", ".md", ".jinja", ".txt", ".py", ".yaml", "")
# Any path may occur in these.
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")


def publish(directory: Path, publication: Publication, out: Path, *, overwrite: bool = False) -> Path:
    """Make what goes to the hub: an export with a full card, and no name of a folder of this machine in it.

    Args:
        directory: A verified export.
        publication: What its card says.
        out: The directory to make.
        overwrite: Replace an earlier one there.

    Returns:
        `out`, absolute.

    Raises:
        UserError: If `out` can't be used or is the export itself, a file names a folder, or the result does not
            verify; nothing new is left behind then.
    """
    out = out.absolute()
    if out.resolve() == directory.resolve():
        raise UserError(f"{str(out)!r} is the export itself; choose another --out")
    names = [name for name in written_files(directory) if name not in (_CARD, MASK_FILE)]
    size = sum((directory / name).stat().st_size for name in written_files(directory))
    check_destination(out, size, overwrite=overwrite)
    masks, description = _renamed(directory, publication)
    with written_aside(out) as partial:
        partial.mkdir()
        for name in progress(names, "copying files"):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(directory / name, partial / name)
        masks.save(partial / MASK_FILE)
        (partial / _ATTRIBUTES).write_text(_attributes(partial))
        (partial / _CARD).write_text(model_card(masks, description, publication), encoding="utf-8")
        write_sidecar(partial, description)
        _check_no_folders(partial, [*written_files(partial), SIDECAR], [directory.parent])
        require_verified("the directory to be published", partial)
    return out


def _renamed(directory: Path, publication: Publication) -> tuple[MaskSet, Mapping[str, Any]]:
    """The masks and the sidecar, with names that mean something elsewhere."""
    masks, description = MaskSet.load(directory), read_sidecar(directory)
    # The hub's model has other weights than a GGUF file made of it.
    known = publication.base if "dequantized" not in description else None
    spec = known or public_name(masks.base.spec)
    renamed = replace(masks, base=replace(masks.base, spec=spec))
    kept = {key: value for key, value in description.items() if key not in _HASHES}
    public: dict[str, Any] = public_values(kept)
    return renamed, public | {"base": description["base"] | {"spec": spec}}


def _attributes(directory: Path) -> str:
    """What the hub would write itself, so that the file is covered by the sidecar too."""
    large = [name for name in written_files(directory) if (directory / name).stat().st_size >= _LARGE]
    patterns = ["*.safetensors", *(name for name in large if not name.endswith(".safetensors"))]
    return "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in patterns)


def _check_no_folders(directory: Path, names: Iterable[str], others: Iterable[Path]) -> None:
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
