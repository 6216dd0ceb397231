"""Measure what layers are given while a model runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roi_lightning.oneshot.statistics import InputStatistics
from roi_lightning.prunable import input_dim


class Measurement:
    """Statistics of the inputs of some layers; layers that are always given one and the same tensor share a sum.

    Query, key and value projections do, gate and up projections do: most of the work is done once for them.

    Args:
        make: Makes empty statistics for a number of inputs.
    """

    def __init__(self, make: Callable[[int], InputStatistics]) -> None:
        self._make = make
        self._sums: dict[str, InputStatistics] = {}
        self._calls: dict[str, int] = {}
        self._given: dict[str, Tensor] = {}
        self._leader: dict[str, str] = {}

    def of(self, name: str, layer: nn.Module) -> InputStatistics:
        """What a layer met; empty if it was never called."""
        return self._sums[self._leader[name]] if name in self._leader else self._make(_inputs(layer))

    @contextmanager
    def watching(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Measure every call of these layers inside the block."""
        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.callback(layer.register_forward_pre_hook(self._hook(name)).remove)
            yield
        self._given.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._see(name, layer, inputs[0])

        return hook

    def _see(self, name: str, layer: nn.Module, given: Tensor) -> None:
        if name not in self._leader:
            # Only one that was called no more often than this layer can have all its inputs.
            leaders = (n for n, x in self._given.items() if x is given and self._calls[n] == 1)
            self._leader[name] = next(leaders, name)
            if self._leader[name] == name:
                self._sums[name], self._calls[name] = self._make(_inputs(layer)), 0
        leader = self._leader[name]
        if leader == name:
            self._calls[name] += 1
            self._given[name] = given
            self._sums[name].add(given)
        elif self._given.get(leader) is not given:
            raise RuntimeError(f"{name} shared the input of {leader} at first and no longer does")


def _inputs(layer: nn.Module) -> int:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[input_dim(layer)])
