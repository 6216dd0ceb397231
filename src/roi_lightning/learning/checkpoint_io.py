"""Read and write checkpoints: one file, or a folder with a file of every rank; complete or not at all."""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.utils.atomic_io import clear_abandoned, written_aside

_REST: Final = "rest.ckpt"
_SHARDS: Final = "shards"
_STATE: Final = "state_dict"
_OPTIMIZERS: Final = "optimizer_states"
_MARGIN: Final = 1.02  # what files hold besides tensors


class PlainCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints to a temporary path first, without a second copy in memory; reads plain tensors only."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        write_checkpoint(checkpoint, Path(path))

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint as one file; until it is complete, whatever is at `path` stays as it is.

    Raises:
        UserError: If the disk has no space for it or can't be written to.
    """
    _check_space(path, checkpoint)
    with written_aside(path) as partial:
        _write(dict(checkpoint), partial)


def _write(tree: dict[str, Any], file: Path) -> None:
    try:
        torch.save(tree, file)
    except RuntimeError as error:  # torch's form of the system's error
        raise OSError(str(error)) from error


def write_sharded(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint as a folder of safetensors files, each rank its shards; every rank has to call it.

    Args:
        checkpoint: As Lightning dumps it, tensors of the state and the optimizers possibly sharded.
        path: The folder to be; what is there stays as it is until the new one is complete.

    Raises:
        UserError: If the disk has no space for it, can't be written to, or is not the same for all ranks.
    """
    _check_space(path, checkpoint)
    tensors, rest = _taken_apart(checkpoint)
    with _one_aside(path) as partial:
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        try:
            save(tensors, storage_writer=writer)
        except CheckpointException as error:  # raised on every rank if any fails
            reason, _ = next(iter(error.failures.values()))
            raise UserError(f"{str(path)!r} can't be written: {reason}") from error
        if dist.get_rank() == 0:
            shards = sorted(file.name for file in partial.iterdir())
            _write(rest | {_SHARDS: shards}, partial / _REST)
        dist.barrier()
    dist.barrier()


@contextmanager
def _one_aside(path: Path) -> Iterator[Path]:
    """A temporary folder for all ranks, made and renamed by the first."""
    first = dist.get_rank() == 0
    with written_aside(path) if first else nullcontext(path) as own:
        if first:
            own.mkdir()
        shared = [str(own)]
        dist.broadcast_object_list(shared)
        seen = [False] * dist.get_world_size()
        dist.all_gather_object(seen, Path(shared[0]).is_dir())
        if not all(seen):  # torch would make a folder on each machine, each with a part of the checkpoint
            raise UserError(
                f"{str(path)!r} is not visible to every rank; put the run's folder (trainer.default_root_dir) on a "
                "disk that all machines share"
            )
        yield Path(shared[0])


def stored_files(path: Path) -> list[Path]:
    """The files that a checkpoint of either kind has to have."""
    if not path.is_dir():
        return [path]
    return [path / _REST, *(path / name for name in read_rest(path).get(_SHARDS, ()))]


def read_rest(path: Path) -> dict[str, Any]:
    """A checkpoint without the elements of its tensors, which are on the meta device or left out."""
    return _load(path / _REST if path.is_dir() else path, "meta")


def _load(file: Path, device: str) -> dict[str, Any]:
    return torch.load(file, map_location=device, weights_only=True, mmap=True)  # type: ignore[no-any-return]


def read_checkpoint(path: Path, learned: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Read a checkpoint of either kind.

    Args:
        path: The file or folder.
        learned: Sharded parameters by name: of a folder each rank then reads its shards alone. Without them
            everything is read unsharded onto the CPU.

    Returns:
        As Lightning dumped it.
    """
    if not path.is_dir():
        return _load(path, "cpu")
    checkpoint = _load(path / _REST, "cpu")
    checkpoint.pop(_SHARDS, None)
    reader = HuggingFaceStorageReader(str(path))
    tensors = {
        key: _empty(key, entry, learned or {})
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # A warning whenever one process reads alone, as it should here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=learned is None)
    return _put_together(checkpoint, tensors)


def _empty(key: str, entry: TensorStorageMetadata, learned: Mapping[str, Tensor]) -> Tensor:
    """An empty tensor to read a stored one into, sharded as the parameter it belongs to if it has that shape."""
    kind, _, rest = key.partition(".")
    numbered = dict(enumerate(learned.values()))  # as optimizers know them
    parameter = learned.get(rest) if kind == _STATE else numbered.get(int(rest.split(".")[1]))
    if parameter is not None and parameter.shape == entry.size:
        return torch.empty_like(parameter.detach())
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _taken_apart(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of state and optimizers by flat names, and the rest."""
    tensors = {f"{_STATE}.{name}": value for name, value in checkpoint[_STATE].items()}
    optimizers = []
    for number, optimizer in enumerate(checkpoint[_OPTIMIZERS]):
        for index, state in optimizer["state"].items():
            stored = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            tensors |= {f"{_OPTIMIZERS}.{number}.{index}.{key}": value for key, value in stored.items()}
        optimizers.append(optimizer | {"state": tree_map_only(Tensor, lambda _: None, optimizer["state"])})
    return tensors, {**checkpoint, _STATE: {}, _OPTIMIZERS: optimizers}


def _put_together(rest: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        if kind == _STATE:
            rest[_STATE][name] = value
        else:
            number, index, entry = name.split(".", 2)
            rest[_OPTIMIZERS][int(number)]["state"][int(index)][entry] = value
    return rest


def _check_space(path: Path, checkpoint: Mapping[str, Any]) -> None:
    tensors = (leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) * _MARGIN
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    clear_abandoned(folder)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"checkpoint {str(path)!r} needs {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "free space and resume with --resume auto: earlier checkpoints are untouched"
        )
