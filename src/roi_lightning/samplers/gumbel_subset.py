"""One logit per weight as in RoI, relaxed over whole masks instead of pick by pick.

The keys κ φ + g of a draw are those of `GumbelTopK`, and so is the hard mask that they stand for, the N largest of a
group. A candidate mask scores the sum of its keys, and the relaxed mask is Σ_c softmax(scores / τ)_c · candidate_c.
It has no order of picks: where the recursion leaves two weights that are both kept with a sum of 2 but uneven shares,
and nearly all of its gradient in moving these against each other, here both have 1, at any τ, if their lead is large.
So τ can be high, where every group learns in every draw. As N = 1 has no order, it is `GumbelTopK` there.
"""

from dataclasses import dataclass
from math import comb
from typing import Final

from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import ops
from roi_lightning.samplers.base import Draw, DrawArgs, KeptNorm, PerWeightSampler
from roi_lightning.samplers.noise import noise_key

MAX_CANDIDATES: Final = 512


@dataclass(frozen=True)
class GumbelSubset(PerWeightSampler):
    """RoI's logits and draws under a relaxation without an order of picks; not in the paper.

    Args:
        compiled: Whether large layers may go through compiled code; the same masks up to rounding.
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
    def masked_weight(
        self,
        weight: Tensor,
        logits: Tensor,
        pattern: NMPattern,
        draw: Draw,
        layer: str,
        kept_norm: KeptNorm | None = None,
    ) -> Tensor:
        numbers = pattern.n, pattern.m, *noise_key(draw.seed, draw.index, layer), draw.lam, draw.tau
        args = DrawArgs(*numbers, kept_norm is not None, self.compiled)
        return ops.masked_weight(ops.subset_weight, weight, logits, args, kept_norm)
