"""The single checks behind `verify`: each returns what it found, or raises what is wrong.

Which weights were pruned is read from the mask file and never from where the zeros are, because a kept
weight may be zero too.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from roi_lightning.export.sidecar import EXPORTED, describe, file_sha256, read_sidecar, written_files
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.models.base_tensors import BaseTensors, StoredBase, bits, companions, compression, same
from roi_lightning.models.stored_tensors import StoredTensors, own_file, tensor_sha256
from roi_lightning.utils.progress import progress


class CheckFailedError(Exception):
    """A check does not hold; the text says why."""


class Exported:
    """The directory to check, each part read when first asked for.

    Attributes:
        form: The format and version of its sidecar.
        written: What it holds besides weights and the base model's other files.
        changed: Those of the latter that are not as they were.
    """

    form: ClassVar[tuple[str, int]] = (EXPORTED, 1)
    written: ClassVar[tuple[str, ...]] = (MASK_FILE, "README.md")
    changed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def sidecar(self) -> dict[str, Any]:
        """Raises UserError if it is not intact."""
        return read_sidecar(self.directory, *self.form)

    @cached_property
    def masks(self) -> MaskSet:
        """Raises UserError if the mask file is not intact."""
        return MaskSet.load(self.directory)

    @cached_property
    def tensors(self) -> StoredTensors:
        """Raises UserError if weight files are missing."""
        return StoredTensors(self.directory)


def sidecar(export: Exported) -> str:
    """The sidecar is intact."""
    return f"pattern {export.sidecar['pattern']}, checksum right"


def files(export: Exported) -> str:
    """No file is missing, none was added, and the weights are those that transformers reads."""
    listed, present = set(export.sidecar["files"]), set(written_files(export.directory))
    require_none(sorted(listed - present), "missing")
    require_none(sorted(present - listed), "not written by roi_lightning, remove it")
    for name in sorted(present):
        own_file(export.directory / name, export.directory)
    weights, others = export.tensors.files.values(), companions(export.directory)
    require_none(sorted(present.difference(weights, others, export.written)), "of no use in such a directory")
    return f"{len(listed)} and the sidecar, none missing, none extra"


def checksums(export: Exported) -> str:
    """Every file has the hash that the sidecar records."""
    hashes = export.sidecar["files"]
    known = [name for name in hashes if (export.directory / name).is_file()]
    wrong = [n for n in progress(known, "hashing files") if file_sha256(export.directory / n) != hashes[n]]
    require_none(wrong, "changed since the export")
    return f"{len(known)} files have the recorded SHA-256"


def config(export: Exported) -> str:
    """Nothing in the configuration tells engines that weights are compressed."""
    require_none(
        compression(export.directory),
        "config.json has a key that makes engines refuse or misread the model",
    )
    return "no quantization or compression entry"


def mask(export: Exported) -> str:
    """The mask file is intact, obeys N:M along the input dimension, and agrees with the sidecar."""
    masks, sidecar = export.masks, export.sidecar
    described = describe(masks, export.tensors)
    require_none(
        [key for key, value in described.items() if sidecar.get(key) != value],
        "the mask file and the sidecar say different things of",
    )
    if masks.is_mixed:
        return f"{masks.amount} weights kept, in every group as its layer's pattern says: {masks.pattern}"
    return f"{masks.amount} weights kept, {masks.pattern} in every group"


def zeros(export: Exported) -> str:
    """Every pruned weight is +0.0; a kept one may be anything."""
    masks, tensors = export.masks, export.tensors
    wrong = [
        name
        for name, layer in progress(list(masks.layers.items()), "checking zeros")
        if bits(tensors[name].masked_fill(layer.to_bool(), 0)).any()
    ]
    require_none(wrong, "pruned weights that are not +0.0 in")
    return f"{masks.total - masks.kept:,} pruned weights are exactly +0.0 in {len(masks.layers)} tensors"


def updates(export: Exported) -> str:
    """Weights that the method changed are those it left."""
    hashes, tensors = export.masks.updated, export.tensors
    wrong = [n for n in progress(list(hashes), "hashing updates") if tensor_sha256(tensors[n]) != hashes[n]]
    require_none(wrong, "updated weights changed since in")
    others = len(hashes.keys() - export.masks.layers.keys())
    rest = f", {others} without a mask" if others else ""
    return f"{len(hashes) - others} tensors with updated survivors{rest} have the recorded SHA-256"


def copied(export: Exported, base: BaseTensors) -> str:
    """What is no weight is as in the base model's directory."""
    added = set(companions(export.directory)).difference(base.companions)
    require_none(sorted(added), "the base model has no such file")
    if not isinstance(base, StoredBase):
        return "none added, and none to compare: the base is a GGUF file"
    names = [name for name in base.companions if name not in export.changed]
    wrong = [n for n in names if file_sha256(export.directory / n) != file_sha256(base.directory / n)]
    require_none(wrong, "differs from the base model's")
    return f"{len(names)} as in the base model"


def same_tensors(export: Exported, base: BaseTensors) -> str:
    """The same names in the same files."""
    tensors = export.tensors
    moved = {name for name, _ in tensors.files.items() ^ base.files.items()}
    require_none(sorted(moved), "missing, extra or in another file")
    return f"{len(tensors)} tensors have the base model's names and files"


def base_hashes(export: Exported, base: BaseTensors) -> str:
    """The base model is the one the mask was made for."""
    return hashed(export.masks.base.sha256, base)


def survivors(export: Exported, base: BaseTensors) -> str:
    """Masking the base model's tensors gives the exported ones, bit for bit, except those that were updated."""
    masks, tensors = export.masks, export.tensors
    plain = {name: layer for name, layer in masks.layers.items() if name not in masks.updated}
    wrong = [
        name
        for name, layer in progress(list(plain.items()), "comparing survivors")
        if not same(tensors[name], base[name].masked_fill(~layer.to_bool(), 0))
    ]
    require_none(wrong, "kept weights differ from the base model's in")
    kept = sum(layer.kept for layer in plain.values())
    rest = f"; {masks.kept - kept:,} were updated by the method" if masks.updated else ""
    return f"{kept:,} kept weights are bit for bit the base model's{rest}"


def others(export: Exported, base: BaseTensors) -> str:
    """Tensors without a mask are the base model's, bit for bit, except those that were updated."""
    masks, tensors = export.masks, export.tensors
    names = [name for name in base.files if name not in masks.layers and name not in masks.updated]
    wrong = [n for n in progress(names, "comparing tensors") if not same(tensors[n], base[n])]
    require_none(wrong, "differs from the base model's")
    return f"{len(names)} unmasked tensors are bit for bit the base model's"


def hashed(hashes: Mapping[str, str], base: BaseTensors) -> str:
    """The base model's tensors have the hashes that are recorded of them."""
    wrong = [n for n in progress(list(hashes), "hashing the base model") if base.sha256(n) != hashes[n]]
    require_none(wrong, "the base model is not the recorded one, in")
    return f"{len(hashes)} tensors of the base model have the recorded SHA-256"


def require_none(wrong: list[str], what: str) -> None:
    """Raise that a check does not hold, naming the first thing that is wrong."""
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckFailedError(f"{what}: {wrong[0]}{more}")
