"""Sums and products over the members of groups, for kernels that hold one tensor per member."""

import torch
from torch import Tensor

Members = list[Tensor]


def total(parts: Members) -> Tensor:
    """Their sum, added in order."""
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def write_product(out: Tensor, members: Members, weight: Tensor) -> None:
    """Write members * weight into `out`, rounded once to its dtype.

    Args:
        out: [A, M, B], any float dtype.
        members: M tensors [A, B], fp32.
        weight: [A, M, B], any float dtype.
    """
    out.copy_(torch.stack([x * weight[:, i].float() for i, x in enumerate(members)], 1))


def mask_gradient(weight: Tensor, grad: Tensor, mask: Members | None, pull: Tensor) -> Members:
    """The gradient of a mask, from that of the masked weight and from the kept norm.

    Args:
        weight: [A, M, B], any float dtype.
        grad: Of the masked weight.
        mask: The mask that was drawn, M tensors [A, B], where there is a reward for kept norm; else None.
        pull: Of `KeptNorm`, fp32 scalar.

    Returns:
        M tensors [A, B], fp32.
    """
    weights = [weight[:, i].float() for i in range(weight.shape[1])]
    of_mask = [grad[:, i].float() * w for i, w in enumerate(weights)]
    if mask is None:
        return of_mask
    return [g - pull * x * w * w for g, x, w in zip(of_mask, mask, weights, strict=True)]
