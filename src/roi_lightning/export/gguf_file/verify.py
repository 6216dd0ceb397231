"""Prove that a GGUF file holds what the export held: every byte, every zero, and every kept weight."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, dequantize
from torch import Tensor
from transformers import PreTrainedConfig

from roi_lightning.errors import UserError
from roi_lightning.export.checks import CheckFailedError, require_none
from roi_lightning.export.gguf_file.contents import (
    SPARSITY_KEY,
    Array,
    array_sha256,
    encoded,
    entries,
    metadata_sha256,
    read_sparsity,
)
from roi_lightning.export.verify import Check, VerifyReport, run_check
from roi_lightning.masks.layer_patterns import DENSE
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.base_tensors import BaseTensors, open_base
from roi_lightning.models.config import load_config
from roi_lightning.models.source import ModelSource
from roi_lightning.utils.progress import progress


def verify_gguf(file: Path, base: ModelSource | None = None) -> VerifyReport:
    """Check a GGUF file that `write_gguf` wrote.

    Args:
        file: Any file.
        base: The model that the export was made from; without it the kept weights are only known by their hashes.

    Raises:
        UserError: If there is no such file, it was not written by `write_gguf`, or the base can't be read. Whatever
            else is wrong with it is reported, not raised.
    """
    return VerifyReport(file, list(_checks(_Written(file), base)))


def recorded_revision(file: Path) -> str | None:
    """The revision of the base model that a file was made from; None of a local one, or if the record is damaged.

    Raises:
        UserError: As `verify_gguf`.
    """
    written = _Written(file)
    with suppress(ValueError):
        revision: str | None = written.sparsity["base"]["revision"]
        return revision
    return None


class _Written:
    """The file to check, each part read when first asked for."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise UserError(f"no file at {str(file)!r}; give one that convert wrote")
        try:
            self.reader = GGUFReader(file)
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise UserError(f"{str(file)!r} can't be read as GGUF ({error}); write it again") from error
        if SPARSITY_KEY not in self.reader.fields:
            raise UserError(
                f"{str(file)!r} says nothing of masks: convert did not write it, and verify can't check it"
            )

    @cached_property
    def sparsity(self) -> dict[str, Any]:
        """What it says of its masks; raises ValueError if that was changed."""
        return read_sparsity(self.text(SPARSITY_KEY))

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """Its tensors' bytes, by name."""
        return {tensor.name: tensor.data for tensor in self.reader.tensors}

    @property
    def metadata(self) -> dict[str, Any]:
        """All that the file says beside its tensors."""
        fields = self.reader.fields.items()
        return {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}

    def values(self, name: str) -> Tensor:
        """A tensor in float32, as the model computes with it."""
        (tensor,) = (x for x in self.reader.tensors if x.name == name)
        return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))

    def is_zero(self, name: str) -> Tensor:
        """Where a tensor is +0.0; a negative value too small for float16 is -0.0."""
        values = self.values(name)
        return (values == 0) & ~torch.signbit(values)

    def text(self, key: str) -> str:
        """A string of its metadata."""
        field = self.reader.fields[key]
        if field.types != [GGUFValueType.STRING]:
            raise ValueError(f"{key} is no text")
        return bytes(field.parts[field.data[0]]).decode()


def _checks(written: _Written, base: ModelSource | None) -> Iterator[Check]:
    intact = run_check("metadata", _metadata, written)
    yield intact
    if not intact.ok:
        return
    yield run_check("checksums", _checksums, written)
    yield run_check("zeros", _zeros, written)
    if base is None:
        return
    config = load_config(base)
    tensors = open_base(base, written.sparsity["base"]["dtype"])
    yield run_check("survivors", _survivors, written, config, tensors)
    yield run_check("other tensors", _others, written, config, tensors)


def _metadata(written: _Written) -> str:
    """What the file says of its masks, of the model's settings and of its tokenizer is as written."""
    said = written.sparsity
    if metadata_sha256(written.metadata) != said["metadata"]:
        raise CheckFailedError("settings of the model or the tokenizer changed since")
    return f"pattern {said['pattern']} in {len(said['layers'])} tensors, made from {said['base']['spec']}"


def _checksums(written: _Written) -> str:
    """Every tensor has the hash that is recorded, and none was added."""
    hashes = written.sparsity["tensors"]
    require_none(sorted(hashes.keys() ^ written.arrays.keys()), "missing or added")
    tensors = progress(list(written.reader.tensors), "hashing tensors")
    wrong = [x.name for x in tensors if array_sha256(x.data, x.tensor_type) != hashes[x.name]]
    require_none(wrong, "changed since")
    return f"{len(hashes)} tensors have the recorded SHA-256"


def _zeros(written: _Written) -> str:
    """No group has more than N weights that are not +0.0."""
    layers = {n: NMPattern(x) for n, x in written.sparsity["layers"].items() if x != DENSE}
    wrong, zeros = [], 0
    for name, pattern in progress(list(layers.items()), "checking zeros"):
        counts = pattern.group(written.is_zero(name)).sum(-1)
        zeros += int(counts.sum())
        if (counts < pattern.m - pattern.n).any():
            wrong.append(name)
    require_none(wrong, "groups with too many weights in")
    return f"{zeros:,} weights are exactly +0.0 in {len(layers)} tensors, as many in each group as the pattern says"


def _survivors(written: _Written, config: PreTrainedConfig, base: BaseTensors) -> str:
    """Converting the base model's masked tensors gives the file's, bit for bit, but for those that were updated."""
    said = written.sparsity
    plain = [name for name in said["layers"] if name not in said["updated"]]
    require_none(_differing(written, config, base, plain), "kept weights differ from the base model's in")
    rest = f"; {len(said['updated'])} were updated by the method" if said["updated"] else ""
    return f"the weights of {len(plain)} tensors that are not zero are bit for bit the base model's{rest}"


def _others(written: _Written, config: PreTrainedConfig, base: BaseTensors) -> str:
    """The other tensors are the base model's, bit for bit."""
    said = written.sparsity
    names = [name for name in written.arrays if name not in said["layers"] and name not in said["updated"]]
    require_none(_differing(written, config, base, names), "differs from the base model's")
    return f"{len(names)} tensors are bit for bit the base model's"


def _differing(written: _Written, config: PreTrainedConfig, base: BaseTensors, names: list[str]) -> list[str]:
    """The tensors that are not the base model's in the file's form, where they are not zero if they have a mask."""
    shapes = {name: base.shape(name) for name in base.files}
    known = {entry.name: entry for entry in entries(config, shapes, written.sparsity["weights"])}
    wrong = sorted(known.keys() ^ written.arrays.keys())
    if wrong:
        raise CheckFailedError(f"missing or added: {wrong[0]}")
    for name in progress(names, "comparing tensors"):
        entry = known[name]
        tensor = base[entry.stored] if entry.stored else None
        mask = ~written.is_zero(name) if name in written.sparsity["layers"] else None
        made = encoded(config, entry, tensor, mask)
        if made.tobytes() != written.arrays[name].tobytes():
            wrong.append(name)
    return wrong
