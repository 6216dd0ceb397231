"""Write the directory that goes to the hub: aside, verified, then renamed."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from roi_lightning.atomic import written_aside
from roi_lightning.errors import UserError
from roi_lightning.export import check_destination
from roi_lightning.export.base import SIDECAR
from roi_lightning.export.card import model_card
from roi_lightning.export.public_names import public_name, public_values
from roi_lightning.export.publication import Publication
from roi_lightning.export.sidecar import read_sidecar, seal, written_files
from roi_lightning.export.verify import require_verified
from roi_lightning.masks import MASK_FILE, MaskSet
from roi_lightning.progress import progress
from roi_lightning.publishing.leaks import check_no_folders

_CARD: Final = "README.md"
_ATTRIBUTES: Final = ".gitattributes"
# The hub keeps larger files than this out of git.
_LARGE: Final = 10 * 2**20
# What sealing writes anew.
_SEALED: Final = ("files", "checksum")


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
        seal(partial, description)
        check_no_folders(partial, [*written_files(partial), SIDECAR], [directory.parent])
        require_verified("the directory to be published", partial)
    return out


def _renamed(directory: Path, publication: Publication) -> tuple[MaskSet, Mapping[str, Any]]:
    """The masks and the sidecar, with names that mean something elsewhere."""
    masks, description = MaskSet.load(directory), read_sidecar(directory)
    # What a GGUF file's weights were made of has others.
    known = publication.base if "dequantized" not in description else None
    spec = known or public_name(masks.base.spec)
    renamed = replace(masks, base=replace(masks.base, spec=spec))
    kept = {key: value for key, value in description.items() if key not in _SEALED}
    public: dict[str, Any] = public_values(kept)
    return renamed, public | {"base": description["base"] | {"spec": spec}}


def _attributes(directory: Path) -> str:
    """What the hub would write itself, so that the file is covered by the sidecar too."""
    large = [name for name in written_files(directory) if (directory / name).stat().st_size >= _LARGE]
    patterns = ["*.safetensors", *(name for name in large if not name.endswith(".safetensors"))]
    return "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in patterns)
