"""Calibration statistics of Wanda and SparseGPT: sums over tokens of layer inputs, in fp32, never the inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.models.layers import Layer


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


# Of products: where the weight is among the arguments and where its inputs are, and whether these are [in, tokens].
# What stands second in a product of two is the weight's transpose.
_MATMUL: Final = ((0, 1, True), (1, 0, False))
_FACTORS: Final[Mapping[Any, tuple[tuple[int, int, bool], ...]]] = {
    F.linear: ((1, 0, False),),
    torch.addmm: ((2, 1, False),),
    torch.matmul: _MATMUL,
    torch.Tensor.matmul: _MATMUL,
    torch.Tensor.__matmul__: _MATMUL,
}


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

    def of(self, name: str, layer: Layer) -> InputObserver:
        """What a layer received; empty if nothing was multiplied by it."""
        if name in self._leader:
            return self._observers[self._leader[name]]
        return self._kind(layer.shape[1], self._device)

    @contextmanager
    def observing(self, lm: nn.Module, layers: Mapping[str, Layer]) -> Iterator[None]:
        """Observe what these layers of a model are multiplied by inside the block, wherever it does so."""
        whole = {name: layer for name, layer in layers.items() if layer.expert is None}
        stacks: dict[str, dict[str, Layer]] = {}
        for name, layer in layers.items():
            if layer.expert is not None:
                stacks.setdefault(layer.module, {})[name] = layer
        with ExitStack() as hooks:
            for module, experts in stacks.items():
                hook = partial(self._observe_experts, experts)
                hooks.callback(lm.get_submodule(module).register_forward_pre_hook(hook).remove)
            hooks.enter_context(_Products(lm, whole, self._observe))
            yield

    def _observe_experts(self, layers: Mapping[str, Layer], stacked: Any, args: tuple[Tensor, ...]) -> None:
        """Observe what a module that holds experts sends through each of them."""
        hidden, chosen = args[:2]
        by_expert: dict[int, list[tuple[str, Layer]]] = {}
        for name, layer in layers.items():
            by_expert.setdefault(layer.expert or 0, []).append((name, layer))
        for expert, own in by_expert.items():
            if len(tokens := hidden[(chosen == expert).any(-1)]):
                inner = stacked._apply_gate(F.linear(tokens, stacked.gate_up_proj[expert]))
                for name, layer in own:
                    self._observe(name, layer, inner if layer.parameter.endswith("down_proj") else tokens)

    def _observe(self, name: str, layer: Layer, x: Tensor) -> None:
        if name not in self._leader:
            # Only one that was read no more often than this layer can have all its inputs.
            leaders = (n for n, other in self._inputs.items() if other is x and self._calls[n] == 1)
            self._leader[name] = next(leaders, name)
            if self._leader[name] == name:
                self._observers[name], self._calls[name] = self._kind(layer.shape[1], self._device), 0
        leader = self._leader[name]
        if leader == name:
            self._calls[name] += 1
            self._inputs[name] = x
            self._observers[name].add(x)
        elif self._inputs.get(leader) is not x:
            raise RuntimeError(f"{name} shared the input of {leader} at first and no longer does")


class _Products(TorchFunctionMode):
    """Reports what a model multiplies by the weights of layers, in a layer's own forward pass or elsewhere.

    Args:
        lm: The model.
        layers: Those watched, by name.
        report: Receives the layer's name, the layer, and the other factor as [..., in].
    """

    def __init__(
        self, lm: nn.Module, layers: Mapping[str, Layer], report: Callable[[str, Layer, Tensor], None]
    ) -> None:
        super().__init__()
        self._layers, self._report = layers, report
        self._owners = {name: lm.get_submodule(layer.module) for name, layer in layers.items()}
        self._names: dict[int, str] = {}

    def _name_of(self, factor: object) -> str | None:
        """The layer whose weight a factor is now; of a sharded model that is another tensor at each call."""
        name = self._names.get(id(factor))
        if name is None or self._owners[name].weight is not factor:
            self._names = {id(owner.weight): name for name, owner in self._owners.items()}
        return self._names.get(id(factor))

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for place, other, turned in _FACTORS.get(func, ()):
            factor = args[place] if len(args) > place else None
            if place and _FACTORS[func] is _MATMUL:
                factor = _transposed(factor)
            if isinstance(factor, nn.Parameter):
                name = self._name_of(factor)
                if name is not None:
                    x = args[other]
                    self._report(name, self._layers[name], x.transpose(-1, -2) if turned else x)
        return func(*args, **(kwargs or {}))


def _transposed(factor: Any) -> Tensor | None:
    """What a factor is the transpose of, as Falcon's own layers write it."""
    base = getattr(factor, "_base", None)
    if base is None or base.ndim != 2 or (factor.shape, factor.stride()) != (base.T.shape, base.T.stride()):
        return None
    return base  # type: ignore[no-any-return]
