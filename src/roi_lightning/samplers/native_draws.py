"""Both samplers' passes through their C++ loops: what a draw is, in the loops' own terms."""

import ctypes
from math import comb
from typing import ClassVar

from torch import Tensor

from roi_lightning.pattern import NMPattern
from roi_lightning.samplers.native import Recipe, library, run, weight_type


class TopKDraw(ctypes.Structure):
    """The `Draw` of gumbel_top_k.cpp."""

    _fields_: ClassVar = [
        ("columns", ctypes.c_int64),
        ("first", ctypes.c_uint32),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("over_lam", ctypes.c_float),
        ("over_tau", ctypes.c_float),
        ("push", ctypes.c_float),
        ("pull", ctypes.c_float),
        ("hard", ctypes.c_int32),
        ("kept_norm", ctypes.c_int32),
    ]


class CategoricalDraw(ctypes.Structure):
    """The `Draw` of categorical.cpp."""

    _fields_: ClassVar = [
        ("columns", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("over_lam", ctypes.c_float),
        ("over_tau", ctypes.c_float),
        ("pull", ctypes.c_float),
        ("kept_norm", ctypes.c_int32),
    ]


def columns_of(weight: Tensor, dim: int) -> int:
    """How far apart the members of a group lie."""
    return 1 if dim == 1 else weight.shape[1]


def masked_weight(
    draw: ctypes.Structure, logits: Tensor, weight: Tensor, out: Tensor, pattern: NMPattern
) -> bool:
    """Write weight * mask into `out`; whether that could be done.

    Args:
        draw: Of the sampler whose logits these are.
        logits: fp32, contiguous.
        weight: Contiguous.
        out: Like the weight.
        pattern: The N:M pattern.
    """
    return _call("masked_weight", draw, (logits, weight, out), weight, pattern)


def logits_gradient(
    draw: ctypes.Structure, logits: Tensor, weight: Tensor, grad: Tensor, out: Tensor, pattern: NMPattern
) -> bool:
    """Write the gradient of the logits into `out`; whether that could be done.

    Args:
        draw: Of the sampler whose logits these are.
        logits: fp32, contiguous.
        weight: Contiguous.
        grad: Of the masked weight, contiguous, of its type.
        out: Like the logits.
        pattern: The N:M pattern.
    """
    return _call("logits_gradient", draw, (logits, weight, grad, out), weight, pattern)


def _call(
    name: str, draw: ctypes.Structure, tensors: tuple[Tensor, ...], weight: Tensor, pattern: NMPattern
) -> bool:
    kind = weight_type(weight)
    if kind is None:
        return False
    constants = {"M": pattern.m, "N": pattern.n, "WEIGHT": kind}
    if isinstance(draw, CategoricalDraw):
        constants["C"] = comb(pattern.m, pattern.n)
    source = "categorical.cpp" if "C" in constants else "gumbel_top_k.cpp"
    loops = library(Recipe(source, tuple(constants.items())))
    if loops is None:
        return False
    run(loops[name], tensors, weight.numel() // pattern.m, draw)
    return True
