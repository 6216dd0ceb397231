"""Calibration statistics of Wanda and SparseGPT: sums over tokens of layer inputs, in fp32, never the inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.models.layers import input_dim


class InputObserver(ABC):
    """A sum over the tokens that a layer receives.

    Args:
        size: The layer's inputs.
        device: Of the sum.

    Attributes:
        axes: 1 for a sum per input, 2 for one per pair of inputs.
        total: The sum, fp32 [in] or [in, in].
        tokens: How many tokens were added.
    """

    axes: ClassVar[int]

    def __init__(self, size: int, device: torch.device) -> None:
        self.total = torch.zeros((size,) * self.axes, dtype=torch.float32, device=device)
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Add the inputs of one forward pass, [..., in]."""
        rows = inputs.detach().flatten(0, -2).float()
        self._accumulate(rows)
        self.tokens += len(rows)

    @property
    def squares(self) -> Tensor:
        """Sum of squares of every input, fp32 [in]."""
        return self.total if self.axes == 1 else self.total.diagonal()

    @abstractmethod
    def _accumulate(self, rows: Tensor) -> None: ...

    def check(self, name: str) -> None:
        """Refuse sums that can't be used.

        Raises:
            UserError: If the layer received no token, or a sum is infinite or NaN.
        """
        if not self.tokens:
            raise UserError(
                f"{name} met no token of the calibration text; give more windows or ignore the layer"
            )
        if not self.total.isfinite().all():
            raise UserError(
                f"{name} met inputs that are infinite or NaN; load the model in another --dtype "
                "or leave the layer out"
            )


class InputNormObserver(InputObserver):
    """Sum of squares of every input, [in]."""

    axes = 1

    @override
    def _accumulate(self, rows: Tensor) -> None:
        self.total += rows.square().sum(0)


class HessianObserver(InputObserver):
    """Sum of products of every two inputs, [in, in]."""

    axes = 2

    @override
    def _accumulate(self, rows: Tensor) -> None:
        with exact_products():
            self.total.addmm_(rows.T, rows)


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products in full fp32: TF32 has ten bits of mantissa, too few for a factorisation."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class ObserverGroup:
    """Observers of several layers; layers that always receive one and the same tensor share one.

    Query, key and value projections do, gate and up projections do: most of the work is done once for them.

    Args:
        kind: Of the observers.
        device: Of their sums.
    """

    def __init__(self, kind: type[InputObserver], device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._observers: dict[str, InputObserver] = {}
        self._calls: dict[str, int] = {}
        self._leader: dict[str, str] = {}
        # Weak: the inputs of a whole model would be more than anything else in memory.
        self._inputs: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def of(self, name: str, layer: nn.Module) -> InputObserver:
        """What a layer received; empty if it was never called."""
        return self._observers[self._leader[name]] if name in self._leader else self._new(layer)

    @contextmanager
    def observing(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observe every call of these layers inside the block."""
        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.callback(layer.register_forward_pre_hook(self._hook(name)).remove)
            yield

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._observe(name, layer, inputs[0])

        return hook

    def _observe(self, name: str, layer: nn.Module, x: Tensor) -> None:
        if name not in self._leader:
            # Only one that was called no more often than this layer can have all its inputs.
            leaders = (n for n, other in self._inputs.items() if other is x and self._calls[n] == 1)
            self._leader[name] = next(leaders, name)
            if self._leader[name] == name:
                self._observers[name], self._calls[name] = self._new(layer), 0
        leader = self._leader[name]
        if leader == name:
            self._calls[name] += 1
            self._inputs[name] = x
            self._observers[name].add(x)
        elif self._inputs.get(leader) is not x:
            raise RuntimeError(f"{name} shared the input of {leader} at first and no longer does")

    def _new(self, layer: nn.Module) -> InputObserver:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return self._kind(weight.shape[input_dim(layer)], self._device)
