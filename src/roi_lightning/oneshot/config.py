"""What the command and the Python function make of the options of pruning without training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError
from roi_lightning.masks.layer_patterns import Pattern, mixed_pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import ChosenLayers, choose_layers
from roi_lightning.oneshot.methods import CalibratedMethod, Magnitude, OneShotMethod, Wanda
from roi_lightning.oneshot.pipeline import Calibration
from roi_lightning.oneshot.prune import calibration_windows
from roi_lightning.oneshot.settings import PruneSettings
from roi_lightning.oneshot.sparsegpt import SparseGPT
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.entry_points import added, load, named

METHODS: Final = {"magnitude": Magnitude, "wanda": Wanda, "sparsegpt": SparseGPT}


@dataclass(frozen=True, kw_only=True)
class PruneConfig(PruneSettings):
    """How to prune, with what the settings name.

    Raises:
        UserError: For an unknown method, and options that a method does not have.
    """

    @cached_property
    def chosen(self) -> OneShotMethod:
        """The method."""
        if isinstance(self.method, OneShotMethod):
            return self.method
        if self.mask_only:
            if self.method != "sparsegpt":
                raise UserError(f"--mask_only is an option of sparsegpt and means nothing to {self.method}")
            return SparseGPT(update_weights=False)
        if self.method in METHODS:
            return METHODS[self.method]()
        if point := added("classes").get(self.method):
            made: OneShotMethod = load(point)()
            return made
        return named(OneShotMethod, self.method, "method", METHODS)  # type: ignore[type-abstract]

    @cached_property
    def layer_pattern(self) -> Pattern:
        """Of all layers, or by glob where there are `patterns`.

        Raises:
            UserError: If one can't be read, or the method can't prune to it.
        """
        pattern = mixed_pattern(NMPattern(self.pattern), self.patterns or {})
        for one in pattern.distinct:
            self.chosen.check_pattern(one)
        return pattern

    @property
    def method_name(self) -> str:
        """The method's short name, or its class's."""
        name = type(self.chosen).__name__
        return name.lower() if name.lower() in (*METHODS, *added("classes")) else name

    def layers(self, spec: str, lm: PreTrainedModel) -> ChosenLayers:
        """The layers of a model to be pruned; `spec` is its name for errors, shapes are enough.

        Raises:
            UserError: If the model, its layers and the pattern don't go together.
        """
        return choose_layers(spec, lm, self.layer_pattern, self.targets, self.ignore)

    def calibration(
        self, spec: str, lm: PreTrainedModel, text: Callable[[], CalibrationDataModule]
    ) -> Calibration | None:
        """What the method measures on; None if it reads no text.

        Args:
            spec: The model's name, for errors.
            lm: The model; shapes are enough.
            text: Makes the text, in windows of `seq_len`; called only if the method reads it.

        Raises:
            UserError: If there is too little text or no such device, or the model can't read a window.
        """
        if not isinstance(self.chosen, CalibratedMethod):
            return None
        device = choose_device(self.device)
        data = text()
        data.check_model(spec, lm.config)
        windows = calibration_windows(data, self.windows)
        return Calibration(windows, self.activations, device, self.offload_dir, self.seed)
