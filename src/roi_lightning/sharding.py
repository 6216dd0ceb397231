"""Weights and logits spread over all ranks, gathered a decoder block at a time while they are used (FSDP2)."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.prunable import decoder_blocks


def shard(lm: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Spread a model over the ranks of a mesh, in place: each decoder block by itself, and what lies outside.

    Args:
        lm: With learning layers attached; every parameter becomes a `DTensor`, cut along its first dimension.
        mesh: Of one dimension.
    """
    for block in lm.get_submodule(decoder_blocks(lm)).children():
        fully_shard(block, mesh=mesh)
    fully_shard(lm, mesh=mesh)
