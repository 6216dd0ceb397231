"""Prove that a packed directory is what `pack` left, and with the base model that its weights are the base's."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from roi_lightning.contrib.packed.format import PATTERN, check_indices
from roi_lightning.contrib.packed.quantizer import FORMER_GUARD, PackedConfig, packed_configuration
from roi_lightning.contrib.packed.tensors import INT8, PACKED, VERSION, PackedTensors, packed_form
from roi_lightning.errors import UserError
from roi_lightning.export import checks
from roi_lightning.export.verify import Check, VerifyReport, run_check
from roi_lightning.masks.mask_set import BaseModel, MaskSet
from roi_lightning.models.base_tensors import BaseTensors, StoredBase, open_base, same
from roi_lightning.models.source import ModelSource
from roi_lightning.models.stored_tensors import INDEX, read_json, tensor_sha256
from roi_lightning.utils.progress import progress

_UNPROVEN: Final = "can't be compared in int8: only the files' hashes hold them"


class _PackedExport(checks.Exported):
    """A packed directory under suspicion, as the checks of an export see it: masks from indices, tensors unpacked."""

    form = (PACKED, VERSION)
    written, changed = ("README.md",), (INDEX, "config.json")

    @cached_property
    @override
    def tensors(self) -> PackedTensors:  # type: ignore[override]
        return PackedTensors(self.directory)

    @cached_property
    @override
    def masks(self) -> MaskSet:
        base, layers = self.sidecar["base"], self.sidecar["layers"]
        hashes = {name: entry["base_sha256"] for name, entry in layers.items()}
        masks = {name: self.tensors.mask(name) for name in progress(list(layers), "reading indices")}
        return MaskSet(PATTERN, masks, BaseModel(**base, sha256=hashes), self.sidecar["updated"])


def verify_packed(directory: Path, base: ModelSource | None = None) -> VerifyReport:
    """Check a packed directory.

    Args:
        directory: Any directory.
        base: The model whose mask was packed; without it the kept weights are only known by the files' hashes.

    Raises:
        UserError: If the base can't be read. Whatever is wrong inside the directory is reported, not raised.
    """
    return VerifyReport(directory, list(_checks(directory, base)))


def _checks(directory: Path, base: ModelSource | None) -> Iterator[Check]:
    export = _PackedExport(directory)
    yield run_check("sidecar", lambda: _sidecar(export))
    yield run_check("files", lambda: checks.files(export))
    yield run_check("checksums", lambda: checks.checksums(export))
    yield run_check("indices", lambda: _indices(export))
    facts: dict[str, Any] = {}
    with suppress(UserError):  # the check of the sidecar says so
        facts = export.sidecar
    yield run_check("configuration", lambda: _configuration(export))
    is_int8 = facts.get("weights") == INT8
    if facts.get("updated"):
        yield run_check("updates", lambda: (_int8_updates if is_int8 else checks.updates)(export))
    if base is None:
        return
    tensors = open_base(base, facts["base"]["dtype"] if facts else "auto")
    yield run_check("copied files", lambda: _copied(export, tensors))
    yield run_check("same tensors", lambda: _same_tensors(export, tensors))
    yield run_check("base hashes", lambda: checks.base_hashes(export, tensors))
    yield run_check("survivors", lambda: (_int8_survivors if is_int8 else checks.survivors)(export, tensors))
    yield run_check("other tensors", lambda: checks.others(export, tensors))


def _sidecar(export: _PackedExport) -> str:
    """The sidecar is intact."""
    form = "packed in int8" if export.sidecar["weights"] == INT8 else "packed"
    return f"pattern {export.sidecar['pattern']}, {form}, checksum right"


def _indices(export: _PackedExport) -> str:
    """Every group of every packed tensor keeps two different weights, in their order."""
    tensors = export.tensors
    for name in progress(list(tensors.layers), "checking indices"):
        check_indices(tensors.packed(name), name)
    return f"{PATTERN} in every group of {len(tensors.layers)} tensors"


def _configuration(export: _PackedExport) -> str:
    """The configuration tells transformers what the sidecar says."""
    config, sidecar = read_json(export.directory / "config.json"), export.sidecar
    packed = PackedConfig(list(sidecar["layers"]), sidecar["weights"])
    right = packed_configuration(config, packed)
    if config not in (right, right | FORMER_GUARD):
        raise checks.CheckFailedError("config.json does not name the tensors that are packed, or their form")
    return f"transformers is told of {len(packed.layers)} packed tensors"


def _copied(export: _PackedExport, base: BaseTensors) -> str:
    """What is no weight is as in the base model's directory, the configuration except what was added to it."""
    if isinstance(base, StoredBase):
        config, dense = (read_json(place / "config.json") for place in (export.directory, base.directory))
        added = {key: config.get(key) for key in packed_configuration({}, PackedConfig([]))}
        if config != dense | added:
            raise checks.CheckFailedError("differs from the base model's: config.json")
    return checks.copied(export, base)


def _same_tensors(export: _PackedExport, base: BaseTensors) -> str:
    """The names are the base model's."""
    if moved := export.tensors.files.keys() ^ base.files.keys():
        raise checks.CheckFailedError(f"missing or extra: {min(moved)}")
    return f"{len(base.files)} tensors have the base model's names"


def _int8_updates(export: _PackedExport) -> str:
    """Updated tensors without a mask are those the method left."""
    hashes, tensors = export.masks.updated, export.tensors
    others = [name for name in hashes if name not in tensors.layers]
    if wrong := [name for name in others if tensor_sha256(tensors[name]) != hashes[name]]:
        raise checks.CheckFailedError(f"updated weights changed since in: {wrong[0]}")
    rest = f"; {len(others)} without a mask have the recorded SHA-256" if others else ""
    return f"{len(hashes) - len(others)} tensors with updated survivors {_UNPROVEN}{rest}"


def _int8_survivors(export: _PackedExport, base: BaseTensors) -> str:
    """Masking and quantising the base model's tensors gives the packed ones, bit for bit, except updated ones."""
    masks, tensors = export.masks, export.tensors
    plain = {name: layer for name, layer in masks.layers.items() if name not in masks.updated}
    for name, layer in progress(list(plain.items()), "quantising survivors"):
        wanted = packed_form(name, base[name].masked_fill(~layer.to_bool(), 0), layer, INT8)
        if not all(map(same, tensors.packed(name).parts, wanted.parts)):
            raise checks.CheckFailedError(f"kept weights are not the base model's in int8: {name}")
    kept = sum(layer.kept for layer in plain.values())
    rest = f"; {masks.kept - kept:,} updated by the method {_UNPROVEN}" if masks.updated else ""
    return f"{kept:,} kept weights and their scales are bit for bit the base model's in int8{rest}"
