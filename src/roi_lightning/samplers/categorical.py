"""MaskLLM's sampler: one logit per candidate mask of a group, a softmax over all C(M, N) of them.

The candidates are the N-subsets of a group in lexicographic order. With κ = 1/λ and standard Gumbel noise g, a
draw gives candidate c the probability p_c = softmax((κ φ + g) / τ)_c and the group the mask Σ_c p_c · candidate_c,
soft at all times; the hard mask is the candidate of the largest logit. Logits are laid out candidate-major, [C, ...,
in/M], so that every pass runs along groups.

At 1:M the candidates are the elements, and this is the same thing as `GumbelTopK`, draw by draw.
"""

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers.base import Kernel
from roi_lightning.samplers.relaxation import Relaxation
from roi_lightning.samplers.soft_masks import candidates, mixed_mask

_MAX_CANDIDATES: Final = 20_000


@dataclass(frozen=True)
class Categorical(Relaxation):
    """MaskLLM's relaxation: soft masks in training.

    Args:
        compiled: Whether kernels may draw the masks; without them masks are the same up to rounding.
    """

    method = "maskllm"

    compiled: bool = True

    @override
    def logits_shape(self, weight: tuple[int, ...], pattern: NMPattern) -> tuple[int, ...]:
        """One logit per candidate of every group: [C, ..., in/M].

        Raises:
            UserError: If the pattern has more than 20,000 candidates.
        """
        count = comb(pattern.m, pattern.n)
        if count > _MAX_CANDIDATES:
            raise UserError(
                f"pattern {pattern} has {count:,} candidate masks, and Categorical learns a logit for each, in every "
                f"group (at most {_MAX_CANDIDATES:,}); use GumbelTopK, which needs only {pattern.m}"
            )
        return (count, *weight[:-1], weight[-1] // pattern.m)

    @override
    def initial_logits(
        self, noise: Tensor, mask: Tensor | None, strength: float, pattern: NMPattern
    ) -> Tensor:
        """Noise, plus `strength` * (2 * overlap - N) with the overlap of candidate and prior mask.

        MaskLLM adds α σ (overlap - N/2), σ the noise's standard deviation: the same with `strength` α σ / 2, 0.015
        for its α = 3 and σ = 0.01.
        """
        if mask is None:
            return noise
        logits = noise.clone()
        kept = pattern.group(mask)
        for own, candidate in zip(logits, combinations(range(pattern.m), pattern.n), strict=True):
            overlap = kept[..., list(candidate)].sum(-1)
            own.add_(2 * overlap - pattern.n, alpha=strength)
        return logits

    @override
    def kernel(self, pattern: NMPattern) -> Kernel:
        return Kernel("categorical", pattern, comb(pattern.m, pattern.n))

    @override
    def soft_mask(self, keys: Tensor, pattern: NMPattern, tau: float) -> Tensor:
        return mixed_mask(keys, pattern.n, pattern.m, tau)

    @override
    def hard_mask(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        """The candidate of the largest logit; among equals the earlier one."""
        best = logits[0].detach().clone()
        chosen = torch.zeros(best.shape, dtype=torch.int32, device=best.device)
        for c, candidate in enumerate(logits.detach()):
            chosen.masked_fill_(candidate > best, c)
            torch.maximum(best, candidate, out=best)
        kept = candidates(pattern.n, pattern.m, logits.device)
        keeps = torch.zeros(len(kept), pattern.m, dtype=torch.bool, device=logits.device)
        return keeps.scatter_(1, kept, value=True)[chosen].flatten(-2)

    @override
    def choices(self, logits: Tensor, pattern: NMPattern) -> Tensor:
        return logits.movedim(0, -1)

    @override
    def picks(self, pattern: NMPattern) -> int:
        return 1
