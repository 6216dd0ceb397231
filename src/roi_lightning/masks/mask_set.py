"""The mask set, and the file format of masks: which weights of which tensors are kept, one bit each.

Every method of this project ends in one, and export, comparison and evaluation know nothing else. Layers go
by the names of their tensors on disk, so that a mask needs no model class to be applied.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import LayerPatterns, Pattern, layer_patterns
from roi_lightning.masks.overlap import Overlap
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.utils.atomic_io import written_aside
from roi_lightning.utils.checksummed import read_checksummed, write_checksummed

MASK_FILE: Final = "roi_mask.safetensors"
EXPORT: Final = "export"  # in the folder of a run
_REMEDY: Final = "give an intact mask file of this version"
_HEADER: Final = {
    "format": "roi_lightning.mask",
    "version": "1",
    "bitorder": "lsb-first",
    "dim": "input",
}
_MIXED_VERSION: Final = "2"  # which names no N and M, but a pattern for every layer


@dataclass(frozen=True)
class BaseModel:
    """The model that a mask belongs to.

    Attributes:
        spec: Its name as the user gave it.
        revision: The commit of a hub model, else None.
        dtype: Of the masked tensors as stored (`bfloat16`), or what a GGUF model was cast to.
        sha256: A hash for every masked tensor as stored on disk, unmasked (`tensor_sha256`).
    """

    spec: str
    revision: str | None
    dtype: str
    sha256: dict[str, str]


@dataclass(frozen=True, eq=False)
class MaskSet:
    """The masks of a model.

    Attributes:
        pattern: N kept of every M consecutive inputs; `LayerPatterns` by the same names as `layers` and `dense` where
            not all are alike.
        layers: By the tensor's name on disk, in the model's order.
        base: The model they belong to; hashes exactly these layers.
        updated: For layers whose surviving weights the method changed, the hash of the new masked tensor
            (`tensor_sha256`), and for other tensors that it changed theirs. Such a mask is worth little without them.
        dense: Tensors that their pattern leaves dense, and how many weights each has.
    """

    pattern: Pattern
    layers: dict[str, LayerMask]
    base: BaseModel
    updated: dict[str, str] = field(default_factory=dict)
    dense: dict[str, int] = field(default_factory=dict)

    @property
    def is_mixed(self) -> bool:
        """Whether layers have different patterns."""
        return isinstance(self.pattern, LayerPatterns)

    @property
    def kept(self) -> int:
        """How many weights stay."""
        return sum(layer.kept for layer in self.layers.values())

    @property
    def total(self) -> int:
        """How many weights the masks cover."""
        return sum(layer.total for layer in self.layers.values())

    @property
    def amount(self) -> str:
        """How many weights stay, in words; of mixed patterns counting layers left dense, and as a share."""
        if not self.is_mixed:
            return f"{self.kept:,} of {self.total:,}"
        dense = sum(self.dense.values())
        kept, prunable = self.kept + dense, self.total + dense
        return f"{kept:,} of {prunable:,} ({kept / prunable:.1%}, mixed patterns)"

    def check(self) -> None:
        """Refuse masks that break the pattern.

        Raises:
            UserError: Naming the first layer with a group that does not keep exactly N, or if there is no
                layer, or if the layers are not those the base model has hashes of.
        """
        if not self.layers:
            raise UserError("the masks cover no layer")
        if self.layers.keys() != self.base.sha256.keys():
            raise UserError("the masked layers are not the ones that have a hash of the base tensor")
        if isinstance(self.pattern, LayerPatterns):
            pruned = {name for name, pattern in self.pattern.by_glob.items() if pattern is not None}
            if pruned != self.layers.keys() or self.pattern.by_glob.keys() - pruned != self.dense.keys():
                raise UserError("the layers with a pattern are not the masked ones and those left dense")
        for name, layer in self.layers.items():
            pattern = self.pattern.of(name)
            pattern.check(layer.shape[1], name)
            if not pattern.holds(layer.to_bool(), dim=0 if layer.transposed else 1):
                raise UserError(f"{name} has a group that does not keep exactly {pattern} weights")

    def overlap(self, other: "MaskSet") -> Overlap:
        """Compare with another mask of the same layers.

        Raises:
            UserError: If the patterns, the layers or their shapes differ.
        """
        if self.pattern != other.pattern:
            raise UserError(
                f"masks of different patterns can't be compared: {self.pattern}, {other.pattern}; give masks of one"
            )
        own, others = ({n: x.shape for n, x in masks.layers.items()} for masks in (self, other))
        if own != others:
            name = min(n for n in own.keys() | others.keys() if own.get(n) != others.get(n))
            raise UserError(
                f"masks of different models can't be compared: they differ in {name!r}; give masks of one"
            )
        both = {name: mask.kept_with(other.layers[name]) for name, mask in self.layers.items()}
        return Overlap(both, {name: mask.kept for name, mask in self.layers.items()})

    def save(self, path: Path) -> None:
        """Write the mask file: to a temporary path, read back, compared, then renamed.

        Raises:
            UserError: If the masks break their pattern or the file can't be written.
        """
        self.check()
        header = self._header()
        with written_aside(path) as partial:
            write_checksummed(partial, {name: layer.packed for name, layer in self.layers.items()}, header)
            tensors, written = read_checksummed(partial)
            if written != header or any(
                not torch.equal(tensors[name], layer.packed) for name, layer in self.layers.items()
            ):
                raise OSError("what was read back differs from what was written")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a mask file, or the one in an exported directory or the folder of a run.

        Raises:
            UserError: If it is no intact mask file; the message names the path and the reason.
        """
        file = exported(path) / MASK_FILE if path.is_dir() else path
        if path.is_dir() and not file.exists():
            raise UserError(
                f"{str(path)!r} has no {MASK_FILE}; give a mask file, an exported directory or its run's folder, in "
                "the place of a packed directory the one that it was packed from"
            )
        try:
            tensors, header = read_checksummed(file)
            masks = cls._parse(tensors, header)
            masks.check()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            said = error if isinstance(error, UserError) else f"its header makes no sense ({error!r})"
            raise UserError(f"mask file {str(file)!r}: {said}; {_REMEDY}") from error
        return masks

    def _header(self) -> dict[str, str]:
        layers = {name: {"shape": x.shape, "transposed": x.transposed} for name, x in self.layers.items()}
        rest = {
            "base_model": self.base.spec,
            "base_revision": self.base.revision or "",
            "dtype": self.base.dtype,
            "sha256": json.dumps(self.base.sha256),
            "updated": json.dumps(self.updated),
            "package_version": importlib.metadata.version("roi-lightning"),
        }
        if isinstance(self.pattern, NMPattern):
            whole = {"n": str(self.pattern.n), "m": str(self.pattern.m), "layers": json.dumps(layers)}
            return _HEADER | whole | rest
        mixed = {name: entry | {"pattern": str(self.pattern.of(name))} for name, entry in layers.items()}
        own = {"version": _MIXED_VERSION, "layers": json.dumps(mixed), "dense": json.dumps(self.dense)}
        return _HEADER | own | rest

    @classmethod
    def _parse(cls, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> Self:
        mixed = header["version"] == _MIXED_VERSION
        for key, value in (_HEADER | ({"version": _MIXED_VERSION} if mixed else {})).items():
            if header[key] != value:
                raise UserError(f"its {key} is {header[key]!r}; this version reads {value!r}")
        entries = _mapping(header["layers"], dict)
        if entries.keys() != tensors.keys():
            raise UserError("its header lists other layers than it holds")
        layers = {name: _layer(tensors[name], entry) for name, entry in entries.items()}
        hashes = _mapping(header["sha256"], str)
        base = BaseModel(header["base_model"], header["base_revision"] or None, header["dtype"], hashes)
        updated = _mapping(header.get("updated", "{}"), str)
        dense = _mapping(header["dense"], int) if mixed else {}
        if mixed:
            pruned = {name: NMPattern(entry["pattern"]) for name, entry in entries.items()}
            return cls(layer_patterns(pruned | dict.fromkeys(dense)), layers, base, updated, dense)
        return cls(NMPattern(f"{header['n']}:{header['m']}"), layers, base, updated)


def exported(path: Path) -> Path:
    """The exported directory of a run where a path is the run's folder; any other path as it is."""
    return path / EXPORT if (path / EXPORT / MASK_FILE).is_file() else path


def _mapping(text: str, kind: type) -> dict[str, Any]:
    """A JSON object whose values are all of one kind."""
    mapping = json.loads(text)
    if not isinstance(mapping, dict) or not all(isinstance(value, kind) for value in mapping.values()):
        raise TypeError(f"not a mapping to {kind.__name__}: {text[:40]}")
    return mapping


def _layer(packed: Tensor, entry: Mapping[str, Any]) -> LayerMask:
    (rows, columns), transposed = entry["shape"], entry["transposed"]
    if not (type(rows) is type(columns) is int and type(transposed) is bool):
        raise TypeError(f"not a shape and whether it is transposed: {entry}")
    return LayerMask(packed, (rows, columns), transposed)
