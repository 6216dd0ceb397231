"""FSDP2: weights and logits sharded over all ranks; a decoder block's masked weights are gathered while it is used.

Lightning's strategy for it, data-parallel over all ranks, with this project's checkpoints.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.learning.checkpoint_io import read_checkpoint, write_sharded
from roi_lightning.models.layers import decoder_blocks
from roi_lightning.utils.dtensor import distribute_like


def shard(models: Sequence[PreTrainedModel], mesh: DeviceMesh, across: Collection[str]) -> None:
    """Shard models in place: each decoder block by itself, then what is outside.

    Args:
        models: Of one structure; every parameter becomes a `DTensor`, cut along its first dimension.
        mesh: Lightning's.
        across: Names of parameters that are cut along their second one, since groups lie along the first.

    Raises:
        UserError: If one of these can't be divided evenly.
    """
    ranks, reduced = mesh["data_parallel"], MixedPrecisionPolicy(reduce_dtype=torch.float32)
    turned = {lm.get_parameter(name): name for lm in models for name in across}
    for weight, name in turned.items():
        if weight.shape[1] % ranks.size():
            raise UserError(
                f"{name!r} has {weight.shape[1]} outputs, which {ranks.size()} devices can't share evenly; run on "
                "another number of devices"
            )

    def cut(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter in turned else None

    for lm in models:
        for block in lm.get_submodule(decoder_blocks(lm)).children():
            fully_shard(block, mesh=ranks, shard_placement_fn=cut, mp_policy=reduced)
        fully_shard(lm, mesh=ranks, mp_policy=reduced)


class FSDP2Strategy(ModelParallelStrategy):
    """Shards weights, logits, gradients and optimizer states over all ranks, each with its own text.

    Every rank writes its own shards of a checkpoint, into a folder of safetensors files. From that, or from a file of
    another strategy, a run resumes on any number of ranks, with or without this strategy.

    Args:
        process_group_backend: `nccl` or `gloo`; if left out, the one that suits the device.
        timeout: Longest time that ranks wait for each other.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta | None = torch.distributed.default_pg_timeout,
    ) -> None:
        super().__init__(tensor_parallel_size=1, process_group_backend=process_group_backend, timeout=timeout)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    # As strategies do that leave all this to the module and its optimizers, which know of shards themselves.
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer
    lightning_module_state_dict = Strategy.lightning_module_state_dict
    optimizer_state = Strategy.optimizer_state
    load_model_state_dict = Strategy.load_model_state_dict

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        write_sharded(checkpoint, Path(self.broadcast(str(filepath))))

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        return read_checkpoint(path, self.lightning_module_state_dict())

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            sharded = {
                index: {key: _sharded(value, parameters[index]) for key, value in values.items()}
                for index, values in state["state"].items()
            }
            optimizer.load_state_dict(state | {"state": sharded})


def _sharded(value: Any, parameter: Tensor) -> Any:
    """A state sharded as its parameter is, if it has that shape and was read unsharded."""
    fits = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
    return distribute_like(value, parameter) if fits else value
