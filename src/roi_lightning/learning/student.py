"""The student: a model that shares all tensors with the frozen teacher but those learned on, which are its own.

Both are ordinary models of transformers. What a step draws is written into the student's tensors before the forward
pass; a hook takes their gradients in the backward pass, each as soon as it is whole.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask, unpack_bits
from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import Layer
from roi_lightning.utils.dtensor import full_tensor, local_tensor, sharded_from


def student_of(teacher: PreTrainedModel, pruned: set[str], alias: bool = False) -> PreTrainedModel:
    """A second instance of a model that shares its parameters and buffers, except some.

    Args:
        teacher: Any model.
        pruned: Names of parameters of which the student has its own, which need a gradient.
        alias: Whether these are parameters of the same memory, to be sharded; else they have memory of their own.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*teacher.parameters(), *teacher.buffers())}
    for name in pruned:
        weight = teacher.get_parameter(name)
        own = weight.detach() if alias else torch.empty_like(weight)
        shared[id(weight)] = nn.Parameter(own, requires_grad=True)
    return deepcopy(teacher, shared)


@dataclass(eq=False)
class PrunedTensor:
    """A tensor that is learned on: the weight of a layer, or one of the weights of all experts of a block.

    Where the model is sharded a rank has some of the tensor's first dimension, with whole groups.

    Attributes:
        name: The layer's; that of experts is without their number.
        layers: The matrices in it by name.
        pattern: Of all of them.
        shape: Of the whole tensor, [out, in] or [experts, out, in].
        teacher: The frozen parameter in which it lies.
        student: The student's in its place.
        learned: The learned parameters by kind.
    """

    name: str
    layers: dict[str, Layer]
    pattern: NMPattern
    shape: tuple[int, ...]
    teacher: nn.Parameter
    student: nn.Parameter
    learned: dict[str, nn.Parameter] = field(default_factory=dict)

    def part(self, tensor: Tensor) -> Tensor:
        """What this rank has of it in a tensor like the parameter, as a view [..., out, in]."""
        own, first = local_tensor(tensor), next(iter(self.layers.values()))
        if first.transposed:
            return own.T
        return own if own.ndim == 2 else own.narrow(1, first.first_row, first.shape[0])

    @property
    def dense(self) -> Tensor:
        """This rank's part of the frozen weight, contiguous."""
        return self.part(self.teacher.detach()).contiguous()

    @property
    def masked(self) -> Tensor:
        """This rank's part of the weight that the student has now, contiguous."""
        return self.part(self.student.detach()).contiguous()

    def write(self, weight: Tensor) -> None:
        """Give the student a weight, this rank's part of it; nothing is left to do where it was made in place."""
        own = self.part(self.student.detach())
        if own.data_ptr() != weight.data_ptr():
            own.copy_(weight)

    @property
    def rows(self) -> slice:
        """What this rank has of the first dimension."""
        count = len(self.part(self.teacher))
        if not isinstance(self.teacher, DTensor):
            return slice(0, count)
        ranks, rank = self.teacher.device_mesh.size(), self.teacher.device_mesh.get_local_rank()
        first = min(rank * -(-self.shape[0] // ranks), self.shape[0])
        return slice(first, first + count)

    @property
    def first_group(self) -> int:
        """The place of this rank's first group in the whole tensor."""
        first: int = self.rows.start
        return first * prod(self.shape[1:]) // self.pattern.m

    def learn(self, kind: str, start: Tensor, shape: tuple[int, ...]) -> None:
        """Add a learned parameter.

        Args:
            kind: What it is called.
            start: Its first values, fp32, this rank's part.
            shape: Of the whole.
        """
        if isinstance(self.teacher, DTensor):
            cut = next((i for i, size in enumerate(shape) if start.shape[i] != size), 0)
            start = sharded_from(start, self.teacher.device_mesh, [Shard(cut)], shape)
        self.learned[kind] = nn.Parameter(start)

    def here(self, kind: str) -> Tensor:
        """This rank's part of a learned parameter."""
        return local_tensor(self.learned[kind].detach())

    def whole(self, kind: str) -> Tensor:
        """A learned parameter, gathered; every rank has to call it."""
        return full_tensor(self.learned[kind].detach())

    def add_gradient(self, kind: str, gradient: Tensor) -> None:
        """Add to the gradient of a learned parameter, this rank's part of it."""
        parameter = self.learned[kind]
        if parameter.grad is not None:
            local_tensor(parameter.grad).add_(gradient)
        elif isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = sharded_from(gradient, mesh, placements, parameter.shape)
        else:
            parameter.grad = gradient

    def matrices(self, whole: Tensor) -> Iterator[tuple[str, Layer, Tensor]]:
        """The layers by name, each with its part [out, in] of a tensor of the whole one's shape."""
        parts = whole.view(-1, *self.shape[-2:])
        for (name, layer), part in zip(self.layers.items(), parts, strict=True):
            yield name, layer, part

    def mask(self, masks: Mapping[str, LayerMask]) -> Tensor:
        """The boolean mask of the whole tensor, of those of its layers by name; on a CPU."""
        return torch.stack([masks[name].to_rows() for name in self.layers]).view(self.shape)

    def bits(self, masks: Mapping[str, LayerMask]) -> Tensor:
        """This rank's part of a mask, a bit per weight: uint8 [..., out, ceil(in / 8)], where the weight is."""
        packed = torch.stack([masks[name].packed for name in self.layers])
        return packed.view(*self.shape[:-1], -1)[self.rows].to(self.teacher.device)

    def from_bits(self, bits: Tensor) -> Tensor:
        """The boolean mask of `bits`."""
        return unpack_bits(bits.flatten(0, -2), self.shape[-1]).view(-1, *self.shape[1:])

    def gathered(self, part: Tensor) -> Tensor:
        """The whole of a tensor [..., out, in] of which every rank has its part; every rank has to call it."""
        if not isinstance(self.teacher, DTensor):
            return part
        return sharded_from(part, self.teacher.device_mesh, [Shard(0)], self.shape).full_tensor()

    def pruned(self, weight: Tensor, mask: Tensor) -> Tensor:
        """This rank's part of a weight under a boolean mask of the whole tensor."""
        return weight.masked_fill(~mask[self.rows].to(weight.device), 0)


def pruned_tensors(
    layers: Mapping[str, Layer], pattern: Pattern, teacher: nn.Module, student: nn.Module
) -> Iterator[PrunedTensor]:
    """The tensors in which layers lie, in their order.

    Args:
        layers: To be learned on, by name.
        pattern: Of all of them, or of each.
        teacher: The frozen model.
        student: Its student.

    Raises:
        UserError: If only some experts of a block are to be pruned, or not all alike.
    """
    stacks: dict[tuple[str, int], dict[str, Layer]] = {}
    for name, layer in layers.items():
        stacks.setdefault((layer.parameter, layer.first_row), {})[name] = layer
    for members in stacks.values():
        (name, first), *_ = members.items()
        patterns = {pattern.of(member) for member in members}
        own, shape = teacher.get_parameter(first.parameter), tuple[int, ...](first.shape)
        if first.expert is not None:
            experts, _, kind = name.rpartition(".")
            # `mlp.experts.3.up_proj` without the number.
            name, shape = f"{experts.rpartition('.')[0]}.{kind}", (len(own), *shape)
        if len(patterns) > 1 or len(members) != prod(shape) // first.numel:
            raise UserError(
                f"the experts of {name!r} are learned as one tensor, and {len(members)} of {len(own)} are to be "
                f"pruned, at {' and '.join(map(str, patterns))}; choose all of them, at one pattern"
            )
        yield PrunedTensor(name, members, patterns.pop(), shape, own, student.get_parameter(first.parameter))
