"""Write an exported directory as one GGUF file, for llama.cpp and what is built on it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFWriter
from transformers import PreTrainedConfig

from roi_lightning.errors import UserError
from roi_lightning.export.gguf_file.architectures import architecture, metadata
from roi_lightning.export.gguf_file.contents import (
    FILE_TYPES,
    SPARSITY_KEY,
    Array,
    Entry,
    Weights,
    array_sha256,
    encoded,
    entries,
    metadata_sha256,
    render,
    sparsity,
)
from roi_lightning.export.gguf_file.tokenizer import add_tokenizer
from roi_lightning.export.gguf_file.verify import verify_gguf
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.export.verify import require_ok, require_verified
from roi_lightning.models.config import load_config, load_tokenizer
from roi_lightning.models.source import is_packed, resolve_model
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.utils.atomic_io import check_writable, written_aside
from roi_lightning.utils.progress import progress

_WANTED: Final = "give one that fit, export, prune, apply or refit wrote"
_QUANTIZATION_VERSION: Final = 2


@dataclass(frozen=True)
class GGUFSizes:
    """Sizes in bytes.

    Attributes:
        before: Of the directory's weight files.
        after: Of the GGUF file.
        tensors: How many tensors it holds.
        as_f16: How many matrices are float16 because their rows are no whole number of blocks.
    """

    before: int
    after: int
    tensors: int
    as_f16: int

    def to_json(self) -> dict[str, int]:
        """As JSON."""
        return asdict(self)


def write_gguf(directory: Path, out: Path, *, weights: Weights = "f16", overwrite: bool = False) -> GGUFSizes:
    """Convert an export.

    Args:
        directory: Written by `write_export`.
        out: The file to write.
        weights: What matrices are held in; norms and biases are float32.
        overwrite: Replace a file there.

    Raises:
        UserError: If the directory is no export or does not verify, its model or tokenizer has no counterpart in
            llama.cpp, a weight is too large for float16, or `out` can't be written; nothing new is left behind then.
    """
    sidecar = _check_convertible(directory)
    if out.suffix != ".gguf":
        raise UserError(f"{str(out)!r} does not end in .gguf, by which such files are known; name it so")
    check_writable(out)
    if out.exists() and not overwrite:
        raise UserError(f"{str(out)!r} exists; pass --overwrite to replace it, or choose another --out")
    source = resolve_model(str(directory))
    config, tokenizer = load_config(source), load_tokenizer(source.spec)
    tensors = StoredTensors(directory)
    listed = entries(config, {name: tensors.shape(name) for name in tensors}, weights)
    writer = GGUFWriter(None, architecture(config).name)
    _add_metadata(writer, config, sidecar["base"]["spec"], weights)
    add_tokenizer(writer, tokenizer, config.vocab_size)
    require_verified(repr(str(directory)), directory)
    pairs = _arrays(config, listed, tensors, "hashing tensors")
    hashes = {entry.name: array_sha256(array, entry.type) for entry, array in pairs}
    names = {entry.stored: entry.name for entry in listed if entry.stored}
    said = {key: entry.value for key, entry in writer.kv_data[0].items()}
    description = sparsity(sidecar, names, weights) | {"tensors": hashes, "metadata": metadata_sha256(said)}
    writer.add_string(SPARSITY_KEY, render(description))
    with written_aside(out.absolute()) as partial:
        _write(writer, config, listed, tensors, partial)
        require_ok("what was written", verify_gguf(partial))
    before = sum((directory / file).stat().st_size for file in set(tensors.files.values()))
    wanted = [entry for entry in listed if len(entry.shape) > 1]
    as_f16 = sum(entry.type.name.lower() != weights for entry in wanted)
    return GGUFSizes(before, out.stat().st_size, len(listed), as_f16)


def _check_convertible(directory: Path) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise UserError(f"{str(directory)!r} is no directory; {_WANTED}")
    if is_packed(directory):
        raise UserError(f"{str(directory)!r} is packed; give the directory it was packed from")
    try:
        return read_sidecar(directory)
    except UserError as error:
        raise UserError(f"{str(directory)!r} can't be converted: its {error}; {_WANTED}") from error


def _add_metadata(writer: GGUFWriter, config: PreTrainedConfig, name: str, weights: Weights) -> None:
    writer.add_name(Path(name).name)
    writer.add_file_type(FILE_TYPES[weights])
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata(config).items():
        adders[type(value)](f"{architecture(config).name}.{key}", value)


def _arrays(
    config: PreTrainedConfig, listed: list[Entry], tensors: StoredTensors, description: str
) -> Iterator[tuple[Entry, Array]]:
    for entry in progress(listed, description):
        yield entry, encoded(config, entry, tensors[entry.stored] if entry.stored else None)


def _write(
    writer: GGUFWriter, config: PreTrainedConfig, listed: list[Entry], tensors: StoredTensors, path: Path
) -> None:
    for entry in listed:
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=entry.type
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, array in _arrays(config, listed, tensors, "writing tensors"):
            writer.write_tensor_data(array)
    finally:
        writer.close()
