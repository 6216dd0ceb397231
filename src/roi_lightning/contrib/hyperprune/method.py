"""HyperPrune: one small network, shared by all layers, chooses the mask of every group; learned block by block.

For a group of M weights the network gives a logit for each of the C(M, N) candidate masks. Masks drawn from these by
Gumbel-softmax are to leave the block's output as it is, and the network's earlier logits as they were:

    ‖f(W, x) − f(W⊙M, x)‖² / ‖f(W, x) − x‖² − λ₁ R_outlier + λ₂ R_continual,

with x what the pruned blocks before this one give. After the last step the candidate of the largest logit is kept.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import comb
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.contrib.hyperprune.block import Block, BlockLayer, block_of
from roi_lightning.contrib.hyperprune.network import MaskNetwork
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.masks.layer_patterns import Pattern
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import Layer
from roi_lightning.oneshot.block_runner import BlockRunner
from roi_lightning.oneshot.calibration_statistics import InputNormObserver, InputObserver
from roi_lightning.oneshot.methods import (
    CalibratedMethod,
    LayerResult,
    Magnitude,
    OneShotMethod,
    Wanda,
)
from roi_lightning.oneshot.sparsegpt import SparseGPT
from roi_lightning.samplers import Categorical, Draw
from roi_lightning.samplers.gumbel_top_k import MAX_CANDIDATES
from roi_lightning.samplers.schedules import Exponential

Prior = Literal["none", "magnitude", "wanda", "sparsegpt"]
Features = Literal["weights", "scores"]

_PRIORS: Final[Mapping[str, OneShotMethod]] = {
    "magnitude": Magnitude(),
    "wanda": Wanda(),
    "sparsegpt": SparseGPT(update_weights=False),
}
_SAMPLER: Final = Categorical()


@dataclass(eq=False)
class HyperPrune(CalibratedMethod):
    """Masks from a network that is trained block after block; kept weights stay as they are.

    Layers of different patterns have a network each.

    Attributes:
        steps: Steps of Adam per block.
        windows_per_step: Windows of calibration text per step, drawn by the seed.
        prior: The mask that logits start from: none, magnitude, wanda or sparsegpt (its mask alone).
        prior_strength: Added to a candidate's logit for each weight that both the candidate and the prior keep, and
            subtracted for each that only the candidate keeps; Gumbel noise has a standard deviation of 1.3.
        spread: Upper limit of the root mean square of a layer's logits; larger ones are scaled down, so that groups
            go on trying candidates until the last step.
        features: Number that the network reads for each weight of a group: the weight (`weights`), or weight × norm
            of its input (`scores`), in both cases divided by the layer's root mean square.
        hidden: Width of the network's three hidden layers.
        embedding: Length of the embedding of a block, and of a kind of layer.
        lr: Adam's learning rate.
        tau: Temperature τ of the softmax at a block's first step; it falls geometrically.
        tau_end: Temperature τ at a block's last step.
        outlier: λ₁, the reward for keeping weights on large inputs.
        continual: λ₂, the price of changing the logits of earlier layers.

    Raises:
        UserError: If a number is out of range, or a choice unknown.
    """

    steps: int = 100
    windows_per_step: int = 2
    prior: Prior = "wanda"
    prior_strength: float = 1.0
    spread: float = 2.0
    features: Features = "weights"
    hidden: int = 256
    embedding: int = 16
    lr: float = 1e-3
    tau: float = 1.0
    tau_end: float = 0.1
    outlier: float = 0.1
    continual: float = 0.1

    def __post_init__(self) -> None:
        check_at_least(self, "hyperprune: ", steps=1, windows_per_step=1, hidden=1, embedding=1)
        for name in ("prior_strength", "outlier", "continual"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"hyperprune: {name} is {getattr(self, name)}; give 0 or more")
        for name in ("lr", "tau", "tau_end", "spread"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"hyperprune: {name} is {getattr(self, name)}; give a number above 0")
        for name, known in (("prior", get_args(Prior)), ("features", get_args(Features))):
            if getattr(self, name) not in known:
                raise UserError(
                    f"hyperprune: no {name} {getattr(self, name)!r}; choose among {', '.join(known)}"
                )
        self.observer = SparseGPT.observer if self.prior == "sparsegpt" else InputNormObserver
        self.start(0)

    @override
    def facts(self) -> dict[str, object]:
        return asdict(self)

    @override
    def check_pattern(self, pattern: NMPattern) -> None:
        count = comb(pattern.m, pattern.n)
        if count > MAX_CANDIDATES:
            raise UserError(
                f"pattern {pattern} has {count:,} candidate masks, and hyperprune gives each of them a logit in "
                f"every group (at most {MAX_CANDIDATES}); choose another pattern or method"
            )

    @override
    def start(self, seed: int) -> None:
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._networks: dict[NMPattern, MaskNetwork] = {}
        self._masks: dict[str, Tensor] = {}

    @override
    def see_block(
        self,
        blocks: BlockRunner,
        index: int,
        layers: Mapping[str, Layer],
        inputs: Mapping[str, InputObserver],
        pattern: Pattern,
    ) -> None:
        self.learn(block_of(blocks, index, layers, inputs, pattern))

    @torch.enable_grad()
    def learn(self, block: Block) -> None:
        """Learn one block; called in the model's order.

        Raises:
            UserError: If its numbers can't be used.
        """
        if not block.layers:  # no expert of it received a token
            return
        layers = {name: self._prepared(name, layer) for name, layer in block.layers.items()}
        learned = [
            parameter
            for pattern, network in self._networks.items()
            if (kinds := {x.kind for x in block.layers.values() if x.pattern == pattern})
            for parameter in network.begin(block.index, kinds)
        ]
        optimizer = torch.optim.Adam(learned, lr=self.lr)
        for step in range(self.steps):
            optimizer.zero_grad()
            self._backward(block, layers, step)
            optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in learned):
            raise UserError(
                f"hyperprune: its network has become infinite or NaN in block {block.index}; lower lr, or load the "
                "model in another --dtype"
            )
        for name, layer in layers.items():
            with torch.no_grad():
                self._masks[name] = _SAMPLER.hard_mask(layer.logits(block.index), layer.pattern)
            layer.network.remember(layer.groups, block.index, layer.kind)

    @override
    def prune(
        self, weight: Tensor, inputs: InputObserver | None, pattern: NMPattern, name: str
    ) -> LayerResult:
        return LayerResult(self._masks.pop(name))

    def _prepared(self, name: str, layer: BlockLayer) -> "_Layer":
        weight, pattern = layer.weight, layer.pattern
        if pattern not in self._networks:
            self._networks[pattern] = MaskNetwork(
                pattern, self.hidden, self.embedding, self._seed, weight.device
            )
        start = None
        if self.prior != "none":
            mask = _PRIORS[self.prior].prune(weight, layer.inputs, pattern, name).mask
            shape = _SAMPLER.logits_shape((weight.shape[0], weight.shape[1]), pattern)
            zeros = torch.zeros(shape, device=weight.device)
            start = _SAMPLER.initial_logits(zeros, mask, self.prior_strength, pattern)
        groups = group_features(layer, self.features)
        squares, network = layer.inputs.squares, self._networks[pattern]
        return _Layer(weight, squares, pattern, layer.kind, groups, start, network, self.spread)

    def _backward(self, block: Block, layers: Mapping[str, "_Layer"], step: int) -> None:
        """Add the gradients of one step."""
        tau = Exponential(self.tau, self.tau_end, 1.0).at(step, max(1, self.steps - 1))
        number = block.index * self.steps + step
        drawn = {
            name: layer.drawn(Draw.of(self._seed, number, name, 1.0, tau), block.index)
            for name, layer in layers.items()
        }
        # The backward pass of the block ends at the weights, so that windows need the network only once.
        weights = {name: weight.detach().requires_grad_() for name, weight in drawn.items()}
        chosen = torch.randint(block.windows, (self.windows_per_step,), generator=self._generator)
        for window in chosen.tolist():
            (output_error(block, window, weights) / len(chosen)).backward()
        kept = [outlier_term(weights[name], layer.weight, layer.squares) for name, layer in layers.items()]
        (-self.outlier * torch.stack(kept).mean()).backward()
        torch.autograd.backward(list(drawn.values()), [weight.grad for weight in weights.values()])
        for network in {id(layer.network): layer.network for layer in layers.values()}.values():
            (self.continual * network.drift()).backward()


@dataclass(frozen=True)
class _Layer:
    """A layer while its block is learned.

    Attributes:
        weight: [out, in].
        squares: Sum of squares of every input, fp32 [in].
        pattern: N:M.
        kind: See `BlockLayer`.
        groups: What the network reads, fp32 [groups, M].
        start: The prior's logits, fp32 [C, out, in/M].
        network: Of its pattern.
        spread: See `HyperPrune`.
    """

    weight: Tensor
    squares: Tensor
    pattern: NMPattern
    kind: str
    groups: Tensor
    start: Tensor | None
    network: MaskNetwork
    spread: float

    def logits(self, block: int) -> Tensor:
        """The network's, held to the spread, and the prior's, fp32 [C, out, in/M]."""
        shape = -1, len(self.weight), self.weight.shape[1] // self.pattern.m
        learned = self.network.logits(self.groups, block, self.kind).view(shape)
        held = learned * (self.spread * learned.square().mean().clamp(min=self.spread**2).rsqrt())
        return held if self.start is None else held + self.start

    def drawn(self, draw: Draw, block: int) -> Tensor:
        """The weight under a soft mask, differentiable in the network."""
        return _SAMPLER.masked_weight(self.weight, self.logits(block), self.pattern, draw)


def group_features(layer: BlockLayer, features: Features) -> Tensor:
    """What the network reads of a layer: root mean square 1, fp32 [groups, M]."""
    values = layer.weight.float()
    if features == "scores":
        values = values * layer.inputs.squares.sqrt()
    size = values.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return (values / size).reshape(-1, layer.pattern.m)


def output_error(block: Block, window: int, weights: Mapping[str, Tensor]) -> Tensor:
    """‖f(W, x) − f(W⊙M, x)‖² / ‖f(W, x) − x‖² of a window, differentiable in the weights; fp32 scalar.

    A block adds to what it receives: the error is relative to that.
    """
    with torch.no_grad():
        wanted = block.output(window, {}).float()
        added = (wanted - block.inputs(window)).square().sum()
    error = (block.output(window, weights).float() - wanted).square().sum()
    return error / added.clamp(min=torch.finfo(torch.float32).tiny)


def outlier_term(masked: Tensor, weight: Tensor, squares: Tensor) -> Tensor:
    """R_outlier, Σ‖(W⊙M)·diag(x)‖² over tokens relative to that of all weights; fp32 scalar from 0 to 1.

    Args:
        masked: [out, in].
        weight: Of the same shape.
        squares: Sum of squares of every input, fp32 [in].
    """
    whole = (weight.float().square() * squares).sum().clamp(min=torch.finfo(torch.float32).tiny)
    return (masked.float().square() * squares).sum() / whole
