"""A one-shot method of your own: Wanda with an exponent on the activations.

    roi-lightning prune smollm2-135m --method my_method.PoweredWanda --out pruned
    roi-lightning prune smollm2-135m --method '{class_path: my_method.PoweredWanda, init_args: {exponent: 2}}' --out p

A method chooses the mask of one layer from its weight and sums over its inputs. From Python:
`prune(model, tokenizer, "my_texts/*.txt", method=PoweredWanda(0.5))`.
"""

from torch import Tensor
from typing_extensions import override

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.oneshot import CalibratedMethod, LayerResult
from roi_lightning.oneshot.calibration_statistics import InputNormObserver, InputObserver


class PoweredWanda(CalibratedMethod):
    """The N largest |weight| × ‖input‖₂ ** exponent of each group.

    Args:
        exponent: 0 is magnitude, 1 is Wanda.
    """

    observer = InputNormObserver  # sum of squares of every input; HessianObserver: of products of every two

    def __init__(self, exponent: float = 0.5) -> None:
        self.exponent = exponent

    @override
    def prune(
        self, weight: Tensor, inputs: InputObserver | None, pattern: NMPattern, name: str
    ) -> LayerResult:
        assert inputs is not None
        return LayerResult(pattern.top(weight.float().abs() * inputs.total.sqrt() ** self.exponent))
