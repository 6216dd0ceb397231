"""RoI's sampler: one logit per weight, masks drawn without replacement by the relaxed Gumbel-Top-K.

`GumbelTopK` passes the relaxed mask on, `StraightThrough` passes the hard top-N of the same keys and lets
the gradient flow through the relaxation, `GumbelSubset` relaxes whole masks instead of picks.
"""

from dataclasses import dataclass
from math import comb
from typing import ClassVar, Final

from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers.base import Kernel, PerWeightSampler
from roi_lightning.samplers.reference import PushDown
from roi_lightning.samplers.relaxation import Relaxation
from roi_lightning.samplers.soft_masks import candidate_sums, mixed_mask, recursive_mask

MAX_CANDIDATES: Final = 512


@dataclass(frozen=True)
class GumbelTopK(PerWeightSampler, Relaxation):
    """The paper's relaxation: soft masks in training.

    Args:
        push_down: How a picked element is kept from being picked again: as in the `paper`, or `scaled` by 1 / τ,
            recommended for N >= 3, where the paper's way can pick an element twice (see `relaxed_top_n`).
        compiled: Whether kernels may draw the masks; without them masks are the same up to rounding.

    Attributes:
        hard_forward: Whether the forward pass sees a hard mask.
    """

    method = "roi"
    hard_forward: ClassVar[bool] = False

    push_down: PushDown = "paper"
    compiled: bool = True

    @override
    def advice(self, pattern: NMPattern, tau: float) -> str | None:
        if tau > 1 and pattern.n > 1:
            return (
                f"with model.tau above 1, here {tau:g}, the paper's recursion picks a weight twice in many groups of "
                f"{pattern}; take --model.sampler GumbelSubset, or keep tau at 1 or below"
            )
        if self.hard_forward or self.push_down == "scaled" or pattern.n < 3:
            return None
        return (
            f"the paper's recursion can pick a weight twice at {pattern}; --model.sampler.push_down scaled keeps it "
            "from that, and was far better at 4:8 and 8:16"
        )

    @override
    def kernel(self, pattern: NMPattern) -> Kernel:
        scaled = self.push_down == "scaled"
        return Kernel("gumbel_top_k", pattern, pattern.n * pattern.m, scaled, self.hard_forward)

    @override
    def soft_mask(self, keys: Tensor, pattern: NMPattern, tau: float) -> Tensor:
        return recursive_mask(keys, pattern.n, tau, 1.0 if self.push_down == "paper" else 1 / tau)


@dataclass(frozen=True)
class StraightThrough(GumbelTopK):
    """Hard masks forward, the relaxation's gradient backward (the paper's Appendix on straight-through).

    Args:
        push_down: As in `GumbelTopK`; concerns the gradient only.
        compiled: As in `GumbelTopK`.
    """

    hard_forward = True


@dataclass(frozen=True)
class GumbelSubset(PerWeightSampler, Relaxation):
    """RoI's logits and draws under a relaxation over whole masks; not in the paper.

    The keys κ φ + g of a draw are those of `GumbelTopK`, and so is the hard mask that they stand for, the N largest
    of a group. A candidate mask scores the sum of its keys, and the relaxed mask is Σ_c softmax(scores / τ)_c ·
    candidate_c. It has no order of picks: where the recursion leaves two weights that are both kept with a sum of 2
    but uneven shares, and nearly all of its gradient in moving these against each other, here both have 1, at any τ,
    if their lead is large. So τ can be high, where every group learns in every draw. As N = 1 has no order, it is
    `GumbelTopK` there.

    Args:
        compiled: Whether kernels may draw the masks; without them masks are the same up to rounding.
    """

    method = "roi"

    compiled: bool = True

    @override
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern) -> tuple[int, ...]:
        """The weight's.

        Raises:
            UserError: If the pattern has more than 512 candidate masks.
        """
        count = comb(pattern.m, pattern.n)
        if count > MAX_CANDIDATES:
            raise UserError(
                f"pattern {pattern} has {count:,} candidate masks, and GumbelSubset goes through all of them in "
                f"every group (at most {MAX_CANDIDATES}); use GumbelTopK"
            )
        return weight

    @override
    def kernel(self, pattern: NMPattern) -> Kernel:
        return Kernel("gumbel_subset", pattern, comb(pattern.m, pattern.n))

    @override
    def soft_mask(self, keys: Tensor, pattern: NMPattern, tau: float) -> Tensor:
        return mixed_mask(candidate_sums(keys, pattern.n), pattern.n, pattern.m, tau)
