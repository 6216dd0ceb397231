"""Refit: new values for the weights that given masks keep, so that each block's output comes near the dense one's.

The attention and the MLP of a block are fitted after one another, each by Adam on the error of the whole block,

    1/T Σₜ ‖f(W, x)ₜ − f(Ŵ, x)ₜ‖² / ‖f(W, x)ₜ − xₜ‖²,

with x what the blocks before it give once they are refitted, f(W, x) the dense block's output, and T tokens. A token
counts as much as another, however large its hidden states are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import cos, isfinite, pi
from typing import ClassVar, Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError, check_at_least
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.oneshot.methods import Block, BlockMethod, LayerResult, OneShotMethod
from roi_lightning.oneshot.observers import InputNormObserver, InputObserver

_BETAS: Final = (0.9, 0.95)
# [out, in] by the name of a layer.
Weights = dict[str, Tensor]


@dataclass(eq=False)
class Refit(BlockMethod):
    """Fits kept weights block by block; masks stay as they are.

    A block whose error on all of the text does not fall keeps the weights that it had.

    Attributes:
        masks: By the names of layers.
        initial: Gives the masked weight to begin with by the name of a layer, as it is stored.
        part_steps: Steps of Adam for the attention of a block, and again for its MLP.
        windows_per_step: Windows of calibration text per step, in an order drawn by the seed.
        lr: Adam's learning rate at the first step; a cosine leads to a tenth of it.
        errors: Filled with the error of each block before and after, by its index.

    Raises:
        UserError: If a number is out of range.
    """

    masks: Mapping[str, LayerMask]
    initial: Callable[[str], Tensor]
    part_steps: int = 64
    windows_per_step: int = 2
    lr: float = 3e-4
    errors: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)

    observer = InputNormObserver
    updates_weights = True
    doing: ClassVar[str] = "refitting"

    def __post_init__(self) -> None:
        check_at_least(self, "refit: ", part_steps=1, windows_per_step=1)
        if not 0 < self.lr < float("inf"):
            raise UserError(f"refit: lr is {self.lr}; give a number above 0")
        self.steps = 2 * self.part_steps

    @override
    def facts(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("part_steps", "windows_per_step", "lr")}

    @override
    def check_pattern(self, pattern: NMPattern) -> None:
        """Every pattern can be fitted to."""

    @override
    def without_inputs(self) -> OneShotMethod:
        return self

    @override
    def start(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._fitted: Weights = {}
        self.errors.clear()

    @override
    def learn(self, block: Block) -> None:
        masks = {name: self._mask(name).to(layer.weight.device) for name, layer in block.layers.items()}
        before = {name: self._initial(name, mask) for name, mask in masks.items()}
        fitting = _Fitting(block, [block.output(window, {}) for window in range(block.windows)])
        after = dict(before)
        for names in parts_of(block):
            self._fit(fitting, after, {name: masks[name] for name in names})
        self.errors[block.index] = errors = fitting.error(before), fitting.error(after)
        if not all(map(isfinite, errors)):
            raise UserError(
                f"refit: block {block.index} has come out infinite or NaN; lower lr, or load the model in another "
                "--dtype"
            )
        self._fitted |= after if errors[1] < errors[0] else before

    @override
    def prune(
        self, weight: Tensor, inputs: InputObserver | None, pattern: NMPattern, name: str
    ) -> LayerResult:
        mask = self._mask(name).to(weight.device)
        # An expert that no token reaches stays as it was.
        fitted = self._fitted.pop(name) if name in self._fitted else self._initial(name, mask)
        return LayerResult(mask, fitted.to(weight.dtype))

    def _mask(self, name: str) -> Tensor:
        layer = self.masks[name]
        return layer.to_bool().T if layer.transposed else layer.to_bool()

    def _initial(self, name: str, mask: Tensor) -> Tensor:
        stored = self.initial(name)
        rows = stored.T if self.masks[name].transposed else stored
        return rows.to(mask.device, torch.float32).masked_fill(~mask, 0)

    @torch.enable_grad()
    def _fit(self, fitting: "_Fitting", weights: Weights, masks: Mapping[str, Tensor]) -> None:
        """Replace the weights of one part, those with a mask here, by fitted ones."""
        trained = {name: weights[name].clone().requires_grad_() for name in masks}
        optimizer = torch.optim.Adam(trained.values(), lr=self.lr, betas=_BETAS)
        order: list[int] = []
        for step in range(self.part_steps):
            optimizer.param_groups[0]["lr"] = self.lr * (0.55 + 0.45 * cos(pi * step / self.part_steps))
            optimizer.zero_grad()
            for _ in range(self.windows_per_step):
                order = order or torch.randperm(fitting.block.windows, generator=self._generator).tolist()
                # Pruned weights take no part, so that their gradients are zero, and they stay so.
                masked = {name: torch.where(masks[name], x, 0) for name, x in trained.items()}
                error = fitting.window_error(order.pop(), weights | masked)
                (error / self.windows_per_step).backward()
            optimizer.step()
            fitting.block.advance()
        weights |= {name: x.detach() for name, x in trained.items()}


@dataclass(frozen=True)
class _Fitting:
    """A block, and the outputs of the dense one, [1, seq_len, hidden] for every window."""

    block: Block
    wanted: list[Tensor]

    def error(self, weights: Weights) -> float:
        """The mean over all windows, without gradients."""
        with torch.no_grad():
            each = [self.window_error(window, weights) for window in range(self.block.windows)]
            return float(torch.stack(each).mean())

    def window_error(self, window: int, weights: Weights) -> Tensor:
        """The error that the module's text describes, of one window; fp32 scalar."""
        wanted = self.wanted[window].float()
        own = {name: weight.to(self.block.layers[name].weight.dtype) for name, weight in weights.items()}
        error = (self.block.output(window, own).float() - wanted).square().sum(-1)
        added = (wanted - self.block.inputs(window).float()).square().sum(-1)
        return (error / added.clamp(min=torch.finfo(torch.float32).tiny)).mean()


def parts_of(block: Block) -> list[list[str]]:
    """The layers of a block by the submodule that they are in, its attention first; those in none together."""
    parts: dict[str, list[str]] = {}
    for name, layer in block.layers.items():
        submodule, dot, _ = layer.kind.partition(".")
        parts.setdefault(submodule if dot else "", []).append(name)
    return list(parts.values())
