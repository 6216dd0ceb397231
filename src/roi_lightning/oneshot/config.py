"""The options of pruning without training, and what the command and the Python function make of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.masks.layer_patterns import Pattern, mixed_pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import ChosenLayers, choose_layers
from roi_lightning.oneshot import (
    METHODS,
    Activations,
    CalibratedMethod,
    Calibration,
    OneShotMethod,
    SparseGPT,
    calibration_windows,
)
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.entry_points import added, load, named


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """How to prune.

    Attributes:
        method: magnitude (reads no text), wanda, sparsegpt, hyperprune, or a class path, with options as
            '{class_path: SparseGPT, init_args: {damping: 0.1}}'; in Python also the method itself.
        mask_only: With sparsegpt, keep the values of what is kept; otherwise they are updated.
        pattern: N:M, N kept of every M consecutive inputs.
        patterns: Another N:M, or dense, of some layers, by name or glob: '{"*.down_proj": "4:8", "*.k_proj": dense}'.
            A full name wins over globs, of several globs the last.
        windows: How many windows of calibration text.
        seq_len: Tokens of each.
        seed: Of the choice of windows, and of what a method draws.
        activations: What the layers of a block see: sequential, what the pruned blocks before it give; dense, in half
            the passes, what the unpruned ones would.
        device: Where blocks run, one at a time: auto, cpu, cuda or cuda:N.
        offload_dir: Folder for the hidden states between two blocks, which otherwise stay in memory.
        targets: Names or globs of the layers to prune.
        ignore: Names or globs of layers to leave dense.

    Raises:
        UserError: For an unknown method, numbers that make no sense, and options that a method does not have.
    """

    method: str | OneShotMethod = "wanda"
    mask_only: bool = False
    pattern: str = "2:4"
    patterns: Mapping[str, str | int] | None = None
    windows: int = 128
    seq_len: int = 2048
    seed: int = 0
    activations: Activations = "sequential"
    device: str = "auto"
    offload_dir: Path | None = None
    targets: Sequence[str] = ("*",)
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_at_least(self, windows=1, seq_len=2, seed=0)

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
