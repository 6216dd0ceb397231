"""Tensors that may be sharded over ranks (FSDP2's `DTensor`): gathered, as the local shard, or copied to all.

What communicates is a collective: every rank has to call it, in the same order.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

_T = TypeVar("_T")


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor gathered from all ranks; itself if it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is infinite or NaN; every rank has to ask of a sharded tensor, and gets the same answer."""
    own = local_tensor(tensor)
    finite = (
        torch.stack(own.aminmax()).isfinite().all()
        if own.numel()
        else torch.ones((), dtype=torch.bool, device=own.device)
    )
    if isinstance(tensor, DTensor):
        dist.all_reduce(count := finite.int(), dist.ReduceOp.MIN)
        return bool(count)
    return bool(finite)


def distribute_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that every rank has in full as another of the same shape is sharded.

    Args:
        full: On any device.
        like: Sharded or not.

    Returns:
        On the device of `like`; nothing is communicated.
    """
    placed = full.to(like.device)
    if not isinstance(like, DTensor):
        return placed
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


def sharded_from(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The sharded tensor of a shape of which every rank has its part."""
    whole = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def from_first_rank(items: Iterator[_T], all_make: bool) -> Iterator[_T]:
    """What the first rank's iterator gives, on every rank, item by item; without ranks the iterator itself.

    Args:
        items: Of what can be pickled, on the CPU; none of them None.
        all_make: Whether every rank has to take part in making them; otherwise only the first rank's iterator runs.
    """
    if not dist.is_initialized():
        yield from items
        return
    makes = all_make or dist.get_rank() == 0
    while True:
        box = [next(items, None) if makes else None]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return
        yield box[0]
