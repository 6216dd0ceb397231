"""What a run will learn and hold in memory, and the check that refuses one that would run out of memory (OOM).

No weight is read.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from roi_lightning.errors import UserError
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.memory_tracker import LiveBytes, step_bytes
from roi_lightning.learning.student import pruned_tensors
from roi_lightning.models.config import GGUF_DTYPE, compute_dtype, load_config
from roi_lightning.models.loading import meta_language_model
from roi_lightning.utils.devices import memory_of

# Large enough for tables that a tensor has once not to count.
_PROBE: Final = 1 << 20
_PARTS: Final = ("masked_weights", "activations", "loss")


@dataclass(frozen=True)
class Step:
    """How an optimizer step is made of micro-batches.

    Attributes:
        batch_size: Windows of a micro-batch on one device.
        seq_len: Tokens of a window.
        accumulate: Micro-batches of a step.
        checkpointing: Whether activations are computed again in the backward pass.
    """

    batch_size: int
    seq_len: int
    accumulate: int
    checkpointing: bool

    def smaller(self) -> "Step | None":
        """As many windows in micro-batches of half the size, or less; None if they are of one window."""
        for size in range(self.batch_size // 2, 0, -1):
            if self.batch_size % size == 0:
                return replace(self, batch_size=size, accumulate=self.accumulate * self.batch_size // size)
        return None


class Planner:
    """Counts what a learner learns and what a step of it holds.

    Args:
        learner: Not yet built.
        device: Where it will learn, if that is known, see `compute_dtype`.

    Raises:
        UserError: For an unreadable model, patterns that match nothing, or a layer M does not divide.
    """

    def __init__(self, learner: MaskLearningModule, device: torch.device | None = None) -> None:
        self.learner = learner
        self._lives: dict[tuple[tuple[int, int], bool, bool], LiveBytes] = {}
        config = load_config(learner.source, learner.trust_remote_code)
        lm = meta_language_model(config, learner.trust_remote_code)
        self.chosen = learner.choose(lm)
        self.layers = len(self.chosen.pruned) + len(self.chosen.dense)
        self.dtype = _dtype(learner, config, device)
        self.weights = sum(p.numel() for p in lm.parameters()) * self.dtype.itemsize
        self.prunable = self.chosen.prunable
        shapes = [
            learner.shapes(tensor.shape, tensor.pattern).values()
            for tensor in pruned_tensors(self.chosen.pruned, self.chosen.pattern, lm, lm)
        ]
        self.learned = sum(prod(shape) for own in shapes for shape in own)
        pruned = {layer.parameter for layer in self.chosen.pruned.values()}
        self.masked = sum(lm.get_parameter(name).numel() for name in pruned) * self.dtype.itemsize

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per learned parameter, seen by taking one step on a tensor of zeros."""
        probe = torch.nn.Parameter(torch.zeros(_PROBE))
        probe.grad = torch.zeros_like(probe)
        made = self.learner.optimizer([probe])
        with torch.compiler.set_stance("force_eager"):
            made.step()
        held = (value for value in made.state[probe].values() if isinstance(value, Tensor) and value.ndim)
        return sum(map(_bytes, held)) / probe.numel()

    def held(self, sharded: bool) -> int:
        """Bytes that stay from step to step: both models, what is learned, its gradients and its optimizer states.

        Args:
            sharded: Whether models are: they then share no shard, else all that is not pruned.
        """
        models = self.weights + (self.weights if sharded else self.masked)
        return models + round(self.learned * (2 * torch.float32.itemsize + self.state_bytes))

    def sizes(self, step: Step, per_parameter: float | None = None) -> dict[str, int]:
        """Bytes on one device, by part; `total` is the peak, less than the sum where parts take turns.

        Args:
            step: How a step is made up.
            per_parameter: Bytes of optimizer state per learned parameter; those of the configured one if None.
        """
        live = self._played(step)
        state = self.state_bytes if per_parameter is None else per_parameter
        learned = self.learned * torch.float32.itemsize
        sizes = {
            "weights": self.weights,
            "logits": learned,
            "gradients": learned,
            "optimizer": round(self.learned * state),
            **{part: live.peaks[part] for part in _PARTS},
        }
        return sizes | {
            "total": sizes["optimizer"] + max(live.peak, self.weights + self.masked + 2 * learned)
        }

    def _played(self, step: Step) -> LiveBytes:
        key = (step.batch_size, step.seq_len), step.accumulate > 1, step.checkpointing
        if key not in self._lives:
            self._lives[key] = step_bytes(self.learner, self.dtype, *key)
        return self._lives[key]


def _dtype(learner: MaskLearningModule, config: Any, device: torch.device | None) -> torch.dtype:
    if learner.dtype_name != "auto":
        chosen: torch.dtype = getattr(torch, learner.dtype_name)
        return chosen
    stored: torch.dtype = config.get_text_config().dtype or torch.float32
    if learner.source.kind == "gguf":
        stored = getattr(torch, GGUF_DTYPE)
    return stored if device is None else compute_dtype(stored, device)


def _bytes(tensor: Any) -> int:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_bytes(getattr(tensor, name)) for name in names)
    size: int = tensor.untyped_storage().nbytes()
    return size


def check_fits_device(learner: MaskLearningModule, trainer: Trainer) -> None:
    """Refuse a run whose weights, both dense and masked, logits, gradients and optimizer states are too much.

    Args:
        learner: Not yet built.
        trainer: The one that will run it.

    Raises:
        UserError: Saying how much is needed, how much there is, and where to look for what would fit.
    """
    planner = Planner(learner, trainer.strategy.root_device)
    sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    fixed = planner.held(sharded) / (trainer.world_size if sharded else 1)
    limit = memory_of(trainer.strategy.root_device)
    if fixed > limit:
        raise UserError(
            f"weights, logits, gradients and optimizer states take {fixed / 1e9:.1f} GB a device, which has "
            f"{limit / 1e9:.1f} GB; roi-lightning plan --fit_in {limit // 10**9}GB shows what would fit, "
            "and overlays/fsdp2.yaml shards them across devices"
        )
