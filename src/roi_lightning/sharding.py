"""Weights and logits spread over all ranks, gathered a decoder block at a time while they are used (FSDP2)."""

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.prunable import decoder_blocks


def shard(lm: PreTrainedModel, mesh: DeviceMesh, prepare: Callable[[str], None]) -> None:
    """Spread a model over the ranks of a mesh, in place: each decoder block by itself, and what lies outside.

    Args:
        lm: Every parameter becomes a `DTensor`, cut along its first dimension.
        mesh: Of one dimension.
        prepare: Called with the name of every block before that is spread, to attach what is learned: a rank then
            never holds the whole of it.
    """
    blocks = decoder_blocks(lm)
    for name, block in lm.get_submodule(blocks).named_children():
        prepare(f"{blocks}.{name}")
        fully_shard(block, mesh=mesh)
    fully_shard(lm, mesh=mesh)
