"""The N:M pattern: N weights kept of every M consecutive inputs of a linear layer."""

import re
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from roi_lightning.errors import UserError

_SPEC: Final = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*")
_MAX_COUNTED: Final = 256  # an element has at most 255 better ones, as many as a uint8 holds


@dataclass(frozen=True, init=False)
class NMPattern:
    """How many weights of each group stay.

    Args:
        spec: `"N:M"`, N kept out of M. An integer is read as the number that YAML 1.1 makes of an
            unquoted `N:M` (base 60: `2:4` arrives as 124), so that quotes never change the meaning.

    Raises:
        UserError: If the text has another form, or unless 1 <= N < M.
    """

    n: int
    m: int

    def __init__(self, spec: "str | int | NMPattern") -> None:
        n, m = (spec.n, spec.m) if isinstance(spec, NMPattern) else _parse(spec)
        if not 1 <= n < m:
            raise UserError(
                f"pattern {n}:{m} is impossible: N:M keeps N weights of every M, so 1 <= N < M (for example 2:4)"
            )
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "m", m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def distinct(self) -> tuple["NMPattern"]:
        """Itself; as `LayerPatterns` has it, where there are several."""
        return (self,)

    def find(self, name: str) -> "NMPattern":
        """Itself, whatever the layer; as `LayerPatterns` has it."""
        return self

    def of(self, name: str) -> "NMPattern":
        """Itself, whatever the layer; as `LayerPatterns` has it."""
        return self

    def check(self, size: int, name: str = "the layer") -> None:
        """Refuse an input size that M does not divide.

        Raises:
            UserError: If `size` is not a multiple of M; the message names the layer.
        """
        if size % self.m:
            raise UserError(
                f"pattern {self}: {name} has {size} inputs, which {self.m} does not divide; "
                f"choose another pattern or leave the layer out (ignore)"
            )

    def group(self, weight: Tensor, dim: int = -1) -> Tensor:
        """View the groups.

        Args:
            weight: Any shape; `dim` is the input dimension, a multiple of M.
            dim: The dimension along which weights are grouped.

        Returns:
            [..., groups, M], `dim` moved to the end.
        """
        moved = weight.movedim(dim, -1)
        groups: Tensor = moved.unflatten(-1, (-1, self.m))
        return groups

    def top(self, scores: Tensor, dim: int = -1) -> Tensor:
        """Keep the N largest of every group; among equals the lower index wins.

        Args:
            scores: Any float dtype, any shape, grouped along `dim`. No NaN.
            dim: The input dimension.

        Returns:
            Boolean mask of the same shape, exactly N true in every group.
        """
        members = self.group(scores, dim).movedim(-1, 0).contiguous()
        return top_members(members, self.n).movedim(0, -1).flatten(-2).movedim(-1, dim)

    def holds(self, mask: Tensor, dim: int = -1) -> bool:
        """Whether every group of a boolean mask keeps exactly N."""
        return bool((self.group(mask, dim).sum(-1) == self.n).all())


def top_members(members: Tensor, n: int) -> Tensor:
    """The N largest of each group when its elements are along the first axis; ties go to the lower index.

    Counting who beats whom costs M passes over the weights; `topk` promises no order among equals, and a
    stable sort is an order of magnitude slower for small groups.

    Args:
        members: [M, ...], no NaN.
        n: How many to keep.

    Returns:
        Boolean, the same shape.
    """
    if len(members) > _MAX_COUNTED:
        first = members.argsort(dim=0, descending=True, stable=True)[:n]
        return torch.zeros_like(members, dtype=torch.bool).scatter_(0, first, value=True)
    better = torch.zeros(members.shape, dtype=torch.uint8, device=members.device)
    for i in range(len(members)):
        better[:i] += members[i] > members[:i]
        better[i + 1 :] += members[i] >= members[i + 1 :]
    return better < n


def _parse(spec: object) -> tuple[int, int]:
    if isinstance(spec, int):
        return divmod(spec, 60)
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        raise UserError(f"pattern {spec!r:.40} is not of the form N:M, N kept of every M (for example 2:4)")
    return int(match[1]), int(match[2])
