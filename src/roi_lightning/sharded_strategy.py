"""FSDP2 through Lightning, data-parallel over all ranks, with this project's checkpoints."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from roi_lightning.checkpoint_files import read_checkpoint, write_checkpoint, write_sharded
from roi_lightning.shards import spread_like, whole


class ShardedStrategy(ModelParallelStrategy):
    """Spreads weights, logits, gradients and optimizer states over all ranks, each with its own text and masks.

    Args:
        save_distributed_checkpoint: Every rank writes its own shards, into a folder of safetensors files; otherwise
            the first rank gathers them, one tensor at a time, into a file like any other run's. Either kind can be
            gone on with on any number of ranks, with or without this strategy.
        process_group_backend: `nccl`, `gloo`; what suits the device if left out.
        timeout: How long ranks wait for each other.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = torch.distributed.default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        path = Path(self.broadcast(str(filepath)))
        if self._save_distributed_checkpoint:
            write_sharded(checkpoint, path)
            return
        gathered = _gathered(checkpoint, keep=self.is_global_zero)
        if self.is_global_zero:
            write_checkpoint(gathered, path)
        self.barrier()

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        return read_checkpoint(path, self.lightning_module_state_dict())

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own = self.lightning_module_state_dict()
        for name, value in checkpoint["state_dict"].items():
            own[name].copy_(_spread(value, own[name]))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            spread = {
                index: {key: _spread(value, parameters[index]) for key, value in values.items()}
                for index, values in state["state"].items()
            }
            optimizer.load_state_dict(state | {"state": spread})


def _spread(value: Any, parameter: Tensor) -> Any:
    """A state as the parameter is spread, if it is as large and was read whole."""
    fits = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
    return spread_like(value, parameter) if fits else value


def _gathered(tree: Any, keep: bool) -> Any:
    """The same tree with every spread tensor whole and on the CPU, where it is to be kept."""
    if isinstance(tree, DTensor):
        full = whole(tree)
        return full.cpu() if keep else None
    if isinstance(tree, Mapping):
        return {key: _gathered(value, keep) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_gathered(value, keep) for value in tree)
    return tree
