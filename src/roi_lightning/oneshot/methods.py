"""What a one-shot method is, and the two that need no second-order information: magnitude and Wanda."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.oneshot.observers import InputNormObserver, InputObserver


@dataclass(frozen=True)
class LayerResult:
    """What a method makes of one weight.

    Attributes:
        mask: Boolean, of the weight's shape; true is kept.
        weight: The weight with its kept values updated and zeros elsewhere, in its own dtype; None where the
            kept values stay as they are.
    """

    mask: Tensor
    weight: Tensor | None = None


class OneShotMethod(ABC):
    """Prunes one layer at a time.

    Attributes:
        updates_weights: Whether it changes kept weights, too.
    """

    updates_weights: bool = False

    def facts(self) -> dict[str, object]:
        """Its options, for the model card and the sidecar."""
        return {name: value for name, value in vars(self).items() if isinstance(value, str | int | float)}

    @abstractmethod
    def prune(
        self, weight: Tensor, inputs: InputObserver | None, pattern: NMPattern, name: str
    ) -> LayerResult:
        """Choose what to keep.

        Args:
            weight: [out, in], any float dtype.
            inputs: Sums over the layer's inputs; None for methods that use no activations.
            pattern: N:M along the inputs.
            name: The layer's, for messages.

        Raises:
            UserError: If the sums can't be used.
        """


class CalibratedMethod(OneShotMethod):
    """A method that uses the activations of some text.

    Attributes:
        observer: The sums it needs of a layer's inputs.
    """

    observer: type[InputObserver]

    def without_inputs(self) -> OneShotMethod:
        """What takes its place for an expert's layers that no token reaches."""
        return Magnitude()


@dataclass(frozen=True)
class BlockLayer:
    """A layer of a block that is to be pruned.

    Attributes:
        weight: [out, in], any float dtype.
        inputs: Sums over what it received.
        pattern: N:M along the inputs.
        kind: Its name in the block without numbers, the same in every block: `self_attn.q_proj`.
    """

    weight: Tensor
    inputs: InputObserver
    pattern: NMPattern
    kind: str


@dataclass(frozen=True)
class Block:
    """A decoder block, as a method sees it that prunes by the block's output.

    Attributes:
        index: In the model, from 0.
        layers: To be pruned, by full name.
        windows: How many windows of calibration text there are.
        inputs: The hidden states [1, seq_len, hidden] that the block receives for a window, by its number.
        output: The block's output of the same shape for a window, differentiable in the weights [out, in] that take
            the place of its own, by full name.
        advance: To be called after every step, for the progress that is shown.
    """

    index: int
    layers: Mapping[str, BlockLayer]
    windows: int
    inputs: Callable[[int], Tensor]
    output: Callable[[int, Mapping[str, Tensor]], Tensor]
    advance: Callable[[], None]


class BlockMethod(CalibratedMethod):
    """A method that learns all layers of a block together; afterwards `prune` gives the result of each.

    Attributes:
        steps: Of a block.
    """

    steps: int

    @abstractmethod
    def check_pattern(self, pattern: NMPattern) -> None:
        """Refuse a pattern before text or weights are read.

        Raises:
            UserError: If the method can't prune to it.
        """

    @abstractmethod
    def start(self, seed: int) -> None:
        """Begin with a model, and forget any earlier one.

        Args:
            seed: Of all that is random.
        """

    @abstractmethod
    def learn(self, block: Block) -> None:
        """Learn one block; called in the model's order.

        Raises:
            UserError: If the block's numbers can't be used.
        """


class Magnitude(OneShotMethod):
    """The N largest absolute weights of each group; reads no text."""

    @override
    def prune(
        self, weight: Tensor, inputs: InputObserver | None, pattern: NMPattern, name: str
    ) -> LayerResult:
        return LayerResult(pattern.top(weight.float().abs()))


class Wanda(CalibratedMethod):
    """The N largest |weight| × ‖input‖₂ of each group, the norm taken over all calibration tokens.

    The tokens come in windows packed from documents end to end; the published code, and SparseGPT's, takes a random
    crop of each of 128 long documents.
    """

    observer = InputNormObserver

    @override
    def prune(
        self, weight: Tensor, inputs: InputObserver | None, pattern: NMPattern, name: str
    ) -> LayerResult:
        assert isinstance(inputs, InputNormObserver)
        return LayerResult(pattern.top(weight.float().abs() * inputs.total.sqrt()))
