"""Safetensors files of bytes that carry their own checksum and are written the same every time.

The library's own writer orders the header's metadata at random, so that two equal files differ; and its
reader does not notice a flipped bit.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roi_lightning.errors import UserError

_CHECKSUM: Final = "checksum"


def write_checksummed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write bytes under names.

    Args:
        path: The file to make.
        tensors: uint8, contiguous, any shape, on the CPU.
        metadata: Text for the header; the checksum is added to it.

    Raises:
        OSError: If the file can't be written.
    """
    names = sorted(tensors)
    checksum = _checksum(metadata, ((name, tensors[name]) for name in names))
    header: dict[str, object] = {"__metadata__": dict(sorted({**metadata, _CHECKSUM: checksum}.items()))}
    offset = 0
    for name in names:
        end = offset + tensors[name].numel()
        header[name] = {"dtype": "U8", "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes(tensors[name]))


def read_checksummed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of `write_checksummed` and check that it is as it was written.

    Returns:
        The uint8 tensors by name, and the metadata without the checksum.

    Raises:
        UserError: If it is missing, truncated, altered or another kind of file; the message is only the
            reason, for the caller to say which file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    except (OSError, SafetensorError) as error:
        raise UserError(f"it can't be read: {str(error).splitlines()[0]}") from error
    checksum = metadata.pop(_CHECKSUM, None)
    if checksum is None:
        raise UserError("its header has no checksum, so roi_lightning did not write it")
    if any(tensor.dtype != torch.uint8 for tensor in tensors.values()):
        raise UserError("it holds tensors that are not uint8")
    if checksum != _checksum(metadata, tensors.items()):
        raise UserError("its contents do not match its checksum: the file is damaged")
    return tensors, metadata


def _checksum(metadata: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in tensors:
        digest.update(json.dumps([name, list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().numpy().data
