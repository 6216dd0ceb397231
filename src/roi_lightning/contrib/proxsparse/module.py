"""ProxSparse: copies of the weights are trained and drawn towards 2:4; the mask is read off their magnitudes."""

import math
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from roi_lightning.contrib.proxsparse.proximal import apply_prox_
from roi_lightning.errors import UserError
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.student import PrunedTensor
from roi_lightning.masks.pattern import NMPattern

_SAMPLED_GROUPS: Final = 4096
# By part of a model's name: the strength, and what it was found for.
_KNOWN_STRENGTHS: Final = {
    "smollm2-135m": (0.015, "SmolLM2-135M in 300 steps of 1,024 tokens"),
    "qwen2.5": (0.2, "Qwen2.5-14B by the method's authors"),
}


class ProxSparseModule(MaskLearningModule):
    """ProxSparse: train the prunable weights on the text, with a proximal step towards 2:4 after every update.

    The optimizer works on float32 copies of the weights. After each of its steps every group of four inputs is
    replaced by the proximal point of the regulariser (see `proximal`), not scaled by the learning rate. In the end
    the two largest of each group are the mask, and the mask is put on the original weights; the trained ones
    are dropped. Logs `prox/zeros_0`, `prox/zeros_1` and `prox/zeros_2`, the fractions of groups with no zero, one,
    and at least two: the method has converged when the last is near 1.

    Differs from the published code in this: only prunable weights are trained, not embeddings, norms and the head;
    in float32, not bfloat16; the proximal point is exact, where that code stops after 100 rounds; windows are
    packed, and a step is as large as the configuration says, where it took 400 documents of C4 one by one; and its
    second regulariser, towards the original weights, is left out. Its learning rate is that of the overlay: a
    straight line up over the first tenth of the run, then down to 0.

    Args:
        strength: The regulariser's λ, which has to be found for each model: 0.2 to 25 in the published settings.
            Left out, it is 0.015 for SmolLM2-135M and 0.2 for Qwen2.5; a line says what it was found for.
        kwargs: As in `MaskLearningModule`.

    Raises:
        UserError: If the pattern is not 2:4, `strength` not a positive number, or left out for another model.
    """

    learns = "weights"

    def __init__(self, lm: str, *, strength: float | None = None, **kwargs: Any) -> None:
        super().__init__(lm, **kwargs)
        if self.pattern.distinct != (NMPattern("2:4"),):
            raise UserError(
                f"ProxSparseModule learns 2:4 only, model.pattern is {self.pattern}: its regulariser is zero just "
                "where two of four weights are left; set 2:4 or take another learner (RoILightningModule)"
            )
        self._found_for = None
        if strength is None:
            strength, self._found_for = _known_strength(self.source.spec)
        if not 0 < strength < math.inf:
            raise UserError(f"model.strength is {strength}; it must be a positive number, for example 0.2")
        self.strength = strength

    @property
    @override
    def method(self) -> str:
        return "proxsparse"

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self._found_for is not None:
            rank_zero_info(
                f"ProxSparse: strength {self.strength}, found for {self._found_for}; another size or length of run "
                "may want another (model.strength): the log's prox/zeros_2 should come near 1"
            )

    @override
    def shapes(self, shape: tuple[int, ...], pattern: NMPattern) -> dict[str, tuple[int, ...]]:
        return {"master": shape}

    @override
    def begin(self, tensor: PrunedTensor) -> None:
        tensor.here("master").copy_(tensor.dense)

    @override
    def training_weight(self, tensor: PrunedTensor, **learned: Tensor) -> Tensor:
        return learned["master"].to(tensor.teacher.dtype)

    @override
    def hard_mask(self, tensor: PrunedTensor) -> Tensor:
        return tensor.pattern.top(tensor.whole("master").abs())

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for tensor in self.tensors.values():
            # Groups are within rows, which ranks share out.
            apply_prox_(tensor.here("master"), self.strength)
        # Lightning counts the step only after this.
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.trainer.global_step + 1) % every == 0:
            self._log_zeros()

    def _log_zeros(self) -> None:
        counts = torch.stack([zero_counts(x, _SAMPLED_GROUPS) for x in self.tensors.values()]).sum(0)
        fractions = counts / counts.sum()
        self.log_dict({f"prox/zeros_{number}": fraction for number, fraction in enumerate(fractions)})

    @override
    def settings(self) -> dict[str, object]:
        return super().settings() | {"strength": self.strength}


def zero_counts(tensor: PrunedTensor, groups: int) -> Tensor:
    """How many groups of a trained copy have no zero, one, and two or more.

    Args:
        tensor: Whose `master` is looked at.
        groups: About how many to sample, in evenly spaced rows.

    Returns:
        [3], int64.
    """
    grouped = tensor.pattern.group(tensor.whole("master").flatten(0, -2))
    step = max(1, grouped.shape[0] * grouped.shape[1] // groups)
    zeros = (grouped[::step] == 0).sum(-1).clamp_(max=2)
    return torch.bincount(zeros.flatten(), minlength=3)


def _known_strength(spec: str) -> tuple[float, str]:
    for name, known in _KNOWN_STRENGTHS.items():
        if name in spec.lower():
            return known
    raise UserError(
        f"ProxSparse's strength has to be found for each model, and none is known for {spec!r}: set model.strength "
        "(published ones go from 0.2 for Qwen2.5 to 25 for Mistral-7B); the log's prox/zeros_2 should come near 1"
    )
