"""Where two generations part, and whether a tie within rounding explains it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Scores = Callable[[Mapping[int, int]], Mapping[int, Tensor]]


@dataclass(frozen=True)
class Divergence:
    """How the new tokens of two models differ.

    Attributes:
        sequences: How many differ.
        position: Of the first new token that differs in any of them, counted from 0.
        gap: Of each model's logits, its own token's less the other model's, where a sequence first differs: the most
            of any sequence, in units of the rounding of these logits.
    """

    sequences: int
    position: int
    gap: float


def divergence(
    tokens: tuple[Tensor, Tensor], scores: tuple[Scores, Scores], dtype: torch.dtype
) -> Divergence | None:
    """Compare what two models generated from the same prompts.

    Args:
        tokens: Of each, [batch, tokens].
        scores: Each model's logits at given positions, sequence → position; not called where all tokens agree.
        dtype: That the logits were rounded to.
    """
    positions = first_differences(*tokens)
    if not positions:
        return None
    gaps = []
    for own, other, found in zip(tokens, reversed(tokens), (ask(positions) for ask in scores), strict=True):
        for sequence, position in positions.items():
            chosen = int(own[sequence, position]), int(other[sequence, position])
            gaps.append(gap(found[sequence], *chosen, dtype))
    return Divergence(len(positions), min(positions.values()), max(gaps))


def first_differences(ours: Tensor, theirs: Tensor) -> dict[int, int]:
    """Sequence → the first position at which two [batch, tokens] differ, for sequences that do."""
    differ = ours != theirs
    return {i: int(row.int().argmax()) for i, row in enumerate(differ) if row.any()}


def gap(logits: Tensor, chosen: int, other: int, dtype: torch.dtype) -> float:
    """How far one token's logit lies above another's, in units of the larger one's rounding.

    Args:
        logits: [vocabulary].
        chosen: The one token.
        other: The other.
        dtype: That the logits were rounded to.
    """
    high, low = float(logits[chosen]), float(logits[other])
    return (high - low) / _unit(max(abs(high), abs(low)), dtype)


def _unit(size: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of a dtype, as large as `size`."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(size, info.tiny))
    return float(math.ldexp(info.eps, exponent - 1))
