"""Both samplers' passes through their C++ loops: what a draw is, in the loops' own terms."""

import ctypes
from dataclasses import dataclass
from math import comb
from typing import ClassVar

from torch import Tensor

from roi_lightning.native import Recipe
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers.native import SOURCES, library, run, weight_type


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


@dataclass(frozen=True)
class NativeWay:
    """Through the C++ loops; see `drawn.Way`.

    Attributes:
        draw: Of the sampler whose logits they are.
        pattern: The N:M pattern.
    """

    draw: TopKDraw | CategoricalDraw
    pattern: NMPattern

    def masked_weight(self, weight: Tensor, logits: Tensor, out: Tensor) -> bool:
        """Write weight * mask into `out`; whether that could be done."""
        return self._call("masked_weight", weight, logits, weight, out)

    def logits_gradient(self, weight: Tensor, logits: Tensor, grad: Tensor, out: Tensor) -> bool:
        """Write the gradient of the logits into `out`; whether that could be done."""
        return self._call("logits_gradient", weight, logits, weight, grad, out)

    def _call(self, name: str, weight: Tensor, *tensors: Tensor) -> bool:
        kind, m, n = weight_type(weight), self.pattern.m, self.pattern.n
        if kind is None:
            return False
        constants = {"M": m, "N": n, "WEIGHT": kind}
        if isinstance(self.draw, CategoricalDraw):
            constants["C"] = comb(m, n)
        source = "categorical.cpp" if "C" in constants else "gumbel_top_k.cpp"
        loops = library(Recipe(SOURCES / source, tuple(constants.items())))
        if loops is None:
            return False
        run(loops[name], tensors, weight.numel() // m, self.draw)
        return True
