"""Pack an exported 2:4 directory to 9/16 of the masked tensors' bytes, or to less in int8.

It is written at a temporary path, checked, then renamed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from roi_lightning.contrib.packed.describe import PackedSizes, packed_card, packed_sizes
from roi_lightning.contrib.packed.format import PATTERN, is_near
from roi_lightning.contrib.packed.quantizer import PackedConfig, packed_configuration
from roi_lightning.contrib.packed.tensors import (
    INT8,
    PACKED,
    STORED,
    VERSION,
    PackedTensors,
    Weights,
    packed_form,
    packed_layers,
    packed_names,
)
from roi_lightning.errors import UserError
from roi_lightning.export import check_destination, check_not_base
from roi_lightning.export.sidecar import heading, read_sidecar, render, write_sidecar
from roi_lightning.export.verify import verify_export
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import DENSE
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import StoredBase, same, save_tensors
from roi_lightning.models.config import load_config
from roi_lightning.models.loading import meta_language_model
from roi_lightning.models.source import ModelSource, format_of
from roi_lightning.models.stored_tensors import INDEX, read_json
from roi_lightning.utils.atomic_io import written_aside
from roi_lightning.utils.progress import progress

_WANTED: Final = "give one that fit, export, prune or apply wrote"
# What a packed directory's sidecar repeats of the export's.
_KEPT_FACTS: Final = (
    *("pattern", "n", "m", "mixed_patterns", "base", "parameters", "zero_fraction", "training", "perplexity"),
)


def write_packed(
    directory: Path, out: Path, *, weights: Weights = STORED, overwrite: bool = False
) -> PackedSizes:
    """Pack an export.

    Args:
        directory: Written by `write_export`, with a 2:4 mask.
        out: The directory to make.
        weights: How to hold kept weights: in their dtype, or as `int8` with an fp32 scale for each row of outputs.
        overwrite: Replace an earlier one there.

    Raises:
        UserError: If the directory is no such export or does not verify, `out` can't be used, or what was written
            does not unpack to what it was made of (in int8: to half a step of a row, with the same zeros); nothing
            new is left behind then.
    """
    out = out.absolute()
    sidecar = _check_packable(directory)
    source = ModelSource(str(directory), "directory", directory.resolve())
    check_not_base(out, source)
    check_destination(out, overwrite=overwrite)
    verify_export(directory).require(repr(str(directory)))
    masks, base = MaskSet.load(directory), StoredBase(source)
    packed_layers(meta_language_model(load_config(source)), masks.layers)
    check_destination(out, _needed_bytes(base, masks, weights), overwrite=overwrite)
    with written_aside(out) as partial:
        partial.mkdir()
        _write_companions(base, partial, PackedConfig(list(masks.layers), weights))
        _write_weights(base, masks, weights, partial)
        description = _describe(sidecar, base, masks, weights)
        (partial / "README.md").write_text(packed_card(description), encoding="utf-8")
        write_sidecar(partial, description)
        _require_same(base, PackedTensors(partial))
    return packed_sizes(base, PackedTensors(out))


def _check_packable(directory: Path) -> dict[str, Any]:
    """Refuse what can't be packed, even if it verifies.

    Returns:
        The directory's sidecar.

    Raises:
        UserError: If it is no directory, packed already, no export, or an export of another pattern.
    """
    if not directory.is_dir():
        raise UserError(f"{str(directory)!r} is no directory; {_WANTED}")
    if format_of(directory) == PACKED:
        raise UserError(
            f"{str(directory)!r} is packed already; load it with roi_lightning.contrib.packed.from_packed"
        )
    try:
        sidecar = read_sidecar(directory)
    except UserError as error:
        raise UserError(f"{str(directory)!r} can't be packed: its {error}; {_WANTED}") from error
    # Layers left dense stay as they are.
    if sidecar["pattern"] not in (str(PATTERN), f"{PATTERN} + {DENSE}"):
        raise UserError(
            f"{str(directory)!r} has the pattern {sidecar['pattern']}, and only {PATTERN} can be packed, beside "
            f"layers left {DENSE}; learn or prune with {PATTERN}"
        )
    return sidecar


def _needed_bytes(base: StoredBase, masks: MaskSet, weights: Weights) -> int:
    """Half of the masked weights stay, two bits for each, a scale for each row, and change."""
    masked = sum(base[name].nbytes for name in masks.layers)
    values = (masks.total if weights == INT8 else masked) // 2
    rows = sum(layer.shape[int(layer.transposed)] for layer in masks.layers.values())
    return base.nbytes - masked + values + masks.total // 8 + 4 * rows + 2**20


def _write_weights(base: StoredBase, masks: MaskSet, weights: Weights, folder: Path) -> None:
    files = sorted(set(base.files.values()))
    weight_map: dict[str, str] = {}
    for file in progress(files, "packing weights"):
        tensors: dict[str, Tensor] = {}
        for stored in (key for key, home in base.files.items() if home == file):
            tensors |= _parts(stored, base[stored], masks.layers.get(stored), weights)
        save_tensors(tensors, folder / file, "pt")
        weight_map |= dict.fromkeys(tensors, file)
    if (base.directory / INDEX).is_file():
        size = sum((folder / file).stat().st_size for file in files)
        content = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX).write_text(render(content), encoding="utf-8")


def _parts(name: str, tensor: Tensor, mask: LayerMask | None, weights: Weights) -> dict[str, Tensor]:
    """What is written of a tensor."""
    if mask is None:
        return {name: tensor}
    packed = packed_form(name, tensor, mask, weights)
    return dict(zip(packed_names(name, weights), packed.parts, strict=True))


def _write_companions(base: StoredBase, folder: Path, packed: PackedConfig) -> None:
    base.write_companions(folder)
    (folder / INDEX).unlink(missing_ok=True)
    config = folder / "config.json"
    config.write_text(render(packed_configuration(read_json(config), packed)), encoding="utf-8")


def _describe(
    sidecar: Mapping[str, Any], base: StoredBase, masks: MaskSet, weights: Weights
) -> dict[str, Any]:
    layers = {
        name: {
            "transposed": layer.transposed,
            "dtype": str(base[name].dtype).removeprefix("torch."),
            "base_sha256": masks.base.sha256[name],
        }
        for name, layer in masks.layers.items()
    }
    facts = {key: sidecar[key] for key in _KEPT_FACTS if key in sidecar}
    return heading(PACKED, VERSION) | facts | {"weights": weights, "updated": masks.updated, "layers": layers}


def _require_same(base: StoredBase, packed: PackedTensors) -> None:
    if packed.files.keys() != base.files.keys():
        raise UserError("the packed directory holds other tensors than it was made of, and was not kept")
    for name in progress(list(base.files), "unpacking again"):
        if not _is_in(packed, name, base[name]):
            raise UserError(
                f"{name!r} does not come out of the packed directory as it went in; it was not kept"
            )


def _is_in(packed: PackedTensors, name: str, tensor: Tensor) -> bool:
    if packed.weights == STORED or name not in packed.layers:
        return same(packed[name], tensor)
    return is_near(packed.packed(name), tensor.T if packed.layers[name] else tensor)
