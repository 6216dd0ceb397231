"""What a one-shot method is, and the two that need no second-order information: magnitude and Wanda."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import Layer
from roi_lightning.oneshot.block_runner import BlockRunner
from roi_lightning.oneshot.calibration_statistics import InputNormObserver, InputObserver


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

    def check_pattern(self, pattern: NMPattern) -> None:  # noqa: B027  (a hook)
        """Refuse a pattern before text or weights are read, by a UserError; the default takes all."""

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

    def start(self, seed: int) -> None:
        """Begin with a model whose blocks are walked through; `seed` is of all that the method draws."""

    def see_block(
        self,
        blocks: BlockRunner,
        index: int,
        layers: Mapping[str, Layer],
        inputs: Mapping[str, InputObserver],
        pattern: Pattern,
    ) -> None:
        """Look at a block, which is on its device, before its layers are pruned.

        Args:
            blocks: Runs it, on what the pruned blocks before it give (or the unpruned ones, see `Calibration`).
            index: Of the block.
            layers: Those to be pruned that received a token, by name.
            inputs: What they received.
            pattern: Of all layers, or of each.
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
