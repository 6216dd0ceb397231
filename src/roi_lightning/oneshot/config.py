"""The options of pruning without training, and what the command and the Python function make of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError, brief, check_at_least, did_you_mean, reason
from roi_lightning.masks.layer_patterns import Pattern, mixed_pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.config import max_positions
from roi_lightning.models.layers import ChosenLayers, checked_layers
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
from roi_lightning.utils.entry_points import added, load, load_named_classes

_PATTERNS: Final = """give '{"*.down_proj": "4:8", "*.k_proj": dense}' or a YAML file with such a mapping"""


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """How to prune.

    Attributes:
        method: magnitude (reads no text), wanda, sparsegpt, hyperprune, or a class path, with options as
            '{class_path: SparseGPT, init_args: {damping: 0.1}}'; in Python also the method itself.
        mask_only: With sparsegpt, keep the values of what is kept; otherwise they are updated.
        pattern: N:M, N kept of every M consecutive inputs.
        patterns: Another N:M, or dense, of some layers, by name or glob: '{"*.down_proj": "4:8", "*.k_proj": dense}',
            or a YAML file. A full name wins over globs, of several globs the last.
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
    patterns: str | Mapping[str, str | int] | None = None
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
        if self.mask_only:
            if self.method != "sparsegpt":
                raise UserError(f"--mask_only is an option of sparsegpt and means nothing to {self.method}")
            return SparseGPT(update_weights=False)
        if isinstance(self.method, OneShotMethod):
            return self.method
        if self.method in METHODS:
            return METHODS[self.method]()
        more = added("classes")
        if self.method in more:
            made: OneShotMethod = load(more[self.method])()
            return made
        load_named_classes(self.method)
        if not self.method.isidentifier():
            return _by_class_path(self.method)
        known, hint = ", ".join(METHODS), did_you_mean(self.method, METHODS)
        raise UserError(f"no method {self.method!r}: choose among {known} or give a class path{hint}")

    @cached_property
    def layer_pattern(self) -> Pattern:
        """Of all layers, or by glob where there are `patterns`.

        Raises:
            UserError: If one can't be read, or the method can't prune to it.
        """
        pattern = mixed_pattern(NMPattern(self.pattern), read_patterns(self.patterns))
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
            UserError: If the model, its layers or the pattern don't go together.
        """
        return checked_layers(spec, lm, self.layer_pattern, self.targets, self.ignore)

    def calibration(
        self, text: Callable[[], CalibrationDataModule], lm: PreTrainedModel
    ) -> Calibration | None:
        """What the method measures on; None if it reads no text.

        Args:
            text: Makes the text, in windows of `seq_len`; called only if the method reads it.
            lm: The model; shapes are enough.

        Raises:
            UserError: If there is too little text or no such device, or a window is longer than the model takes.
        """
        if not isinstance(self.chosen, CalibratedMethod):
            return None
        device = choose_device(self.device)
        windows = calibration_windows(text(), self.windows, max_positions(lm.config))
        return Calibration(windows, self.activations, device, self.offload_dir, self.seed)


def read_patterns(given: str | Mapping[str, str | int] | None) -> Mapping[str, str | int]:
    """The patterns of some layers.

    Args:
        given: A mapping; one in YAML; a YAML file with one.

    Raises:
        UserError: If it is none of these.
    """
    if not isinstance(given, str):
        return given or {}
    is_file = not given.lstrip().startswith("{")
    try:
        content = yaml.safe_load(Path(given).expanduser().read_text(encoding="utf-8") if is_file else given)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"--patterns {given!r:.200} can't be read ({reason(error)}); {_PATTERNS}") from error
    if not isinstance(content, dict) or not content or not all(isinstance(glob, str) for glob in content):
        raise UserError(f"--patterns {given!r:.200} is no mapping of layers to patterns; {_PATTERNS}")
    return content


def _by_class_path(text: str) -> OneShotMethod:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--method", type=OneShotMethod)
    try:
        made = parser.instantiate_classes(parser.parse_args([f"--method={text}"])).method
    except (ArgumentError, TypeError, ValueError) as error:
        # The first line names the option.
        said = brief(str(error).partition("\n")[2] or str(error))
        raise UserError(
            f"--method {text!r} can't be made: {said}; choose among {', '.join(METHODS)} or give "
            "the class path of a OneShotMethod"
        ) from error
    assert isinstance(made, OneShotMethod)
    return made
