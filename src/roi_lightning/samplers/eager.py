"""The samplers' passes in plain torch: the fallback of every device, chunk by chunk, differentiated by autograd.

Legend: M = elements of a group or C = C(M, N) candidates, along the first axis, E = groups; all tensors fp32.
Reductions over a last axis of size M cost an order of magnitude more than passes over M long rows, hence the layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Final

import torch
from torch import Tensor

from roi_lightning.masks.pattern import NMPattern, top_members
from roi_lightning.samplers.base import Inputs
from roi_lightning.samplers.noise import gumbel, to_int32

# Beyond this lead, e is capped, and log(1 - μ) makes up for it; the others' probabilities are below 1e-17 there.
MAX_LEAD: Final = 40.0
# An element further behind than this counts as this far: probabilities of 1e-11 are below fp32's rounding, and
# exponents that make denormal numbers cost a CPU a hundred times as much as others.
MIN_EXPONENT: Final = -25.0
# Elements worked on at a time: temporaries stay in the CPU's cache, and small beside the tensor.
_CPU_CHUNK: Final = 1 << 18
_CUDA_CHUNK: Final = 1 << 24

# The relaxed mask [M, E] of the keys φ/λ + g of some groups, [M, E] or [C, E], in double precision too.
Relaxation = Callable[[Tensor, Inputs], Tensor]


@dataclass(frozen=True)
class Eager:
    """The passes of one sampler; see `kernels.Kernel`.

    Attributes:
        relaxed: Its relaxation.
        by_candidate: Whether logits are of candidates, [C, ..., out, in/M], or of elements.
    """

    relaxed: Relaxation
    by_candidate: bool = False

    @torch.no_grad()
    def fill(self, inputs: Inputs, out: Tensor) -> bool:
        """Write weight * mask into `out`."""
        for groups in _chunks(inputs):
            keys = self._keys(inputs, self._logits(inputs)[:, groups], groups)
            mask = top_members(keys, inputs.pattern.n) if inputs.hard else self.relaxed(keys, inputs)
            # The product is taken in fp32 and rounded once to the weight's dtype.
            _elements(out, inputs)[:, groups] = mask * _elements(inputs.weight, inputs)[:, groups].float()
        return True

    def logits_gradient(self, inputs: Inputs, gradient: Tensor, out: Tensor) -> bool:
        """Write the gradient of the logits into `out`."""
        for groups in _chunks(inputs):
            elements, own = (_elements(x, inputs)[:, groups].float() for x in (inputs.weight, gradient))
            logits = self._logits(inputs)[:, groups].detach().requires_grad_()
            with torch.enable_grad():
                mask = self.relaxed(self._keys(inputs, logits, groups), inputs)
            (of_logits,) = torch.autograd.grad(mask, logits, own * elements)
            self._rows(out, inputs)[:, groups] = of_logits
        return True

    def _logits(self, inputs: Inputs) -> Tensor:
        return self._rows(inputs.logits, inputs)

    def _rows(self, logits: Tensor, inputs: Inputs) -> Tensor:
        """Logits, or what is like them, as a view [M, E] or [C, E]."""
        return logits.view(len(logits), -1) if self.by_candidate else _elements(logits, inputs)

    def _keys(self, inputs: Inputs, logits: Tensor, groups: slice) -> Tensor:
        """φ/λ + g of some groups."""
        count, draw = len(logits), inputs.draw
        index = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) * count
        index = index + torch.arange(count, dtype=torch.int32, device=logits.device).unsqueeze(1)
        noise = gumbel(index + to_int32((draw.first + groups.start) * count), draw.key)
        return logits / draw.lam + noise


def chunk_size(tensor: Tensor) -> int:
    """How many elements to work on at a time where this tensor is."""
    return _CUDA_CHUNK if tensor.is_cuda else _CPU_CHUNK


def _chunks(inputs: Inputs) -> Iterator[slice]:
    """Groups to work on at a time."""
    groups = inputs.weight.numel() // inputs.pattern.m
    step = max(1, chunk_size(inputs.weight) * groups // max(1, inputs.logits.numel()))
    for start in range(0, groups, step):
        yield slice(start, min(groups, start + step))


def _elements(tensor: Tensor, inputs: Inputs) -> Tensor:
    """A contiguous tensor of the weight's shape as a view [M, E]."""
    return tensor.view(-1, inputs.pattern.m).T


def relaxed_top_n(keys: Tensor, inputs: Inputs) -> Tensor:
    """The relaxed Gumbel-Top-K: N softmaxes one after the other, each key pushed down by log(1 - μ) between them.

    With s the second largest key and e = exp((key - s) / τ), only one element, the leader, can have e > 1. Summing e
    without it gives T >= 1, free of cancellation, so the leader's log(1 - μ) = log T - log(sum of e) stays finite
    however large its lead; every other element has μ <= 1/2, where log(1 - μ) is safe.
    """
    mask: Tensor | None = None
    for k in range(inputs.pattern.n):
        mu, push_down = _pick(keys, inputs.draw.tau)
        mask = mu if mask is None else mask + mu
        if k < inputs.pattern.n - 1:
            keys = torch.add(keys, push_down, alpha=inputs.push)
    assert mask is not None
    return mask


def _pick(keys: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The probabilities μ of one pick, and log(1 - μ)."""
    lowest = MIN_EXPONENT if keys.dtype == torch.float32 else None
    ahead = (keys - _second_largest(keys.detach())) / tau
    exponents = ahead.clamp(lowest, MAX_LEAD)
    e, leads, mu = exponents.exp(), exponents.detach() > 0.0, exponents.softmax(0)
    # Where the two largest are equal nobody leads.
    rest = e.masked_fill(leads, 0.0).sum(0)
    of_leader = rest.log() - e.sum(0).log() - (ahead - MAX_LEAD).clamp(min=0.0)
    return mu, torch.where(leads, of_leader, (1.0 - mu.clamp(max=0.5)).log())


def _second_largest(keys: Tensor) -> Tensor:
    first, second = torch.maximum(keys[0], keys[1]), torch.minimum(keys[0], keys[1])
    for key in keys[2:]:
        second = torch.maximum(second, torch.minimum(first, key))
        first = torch.maximum(first, key)
    return second


def relaxed_subset(keys: Tensor, inputs: Inputs) -> Tensor:
    """A softmax over candidate masks, each of which scores the sum of its elements' keys."""
    kept = candidates(inputs.pattern, keys.device)
    scores = keys.index_select(0, kept[:, 0])
    for elements in kept.T[1:]:
        scores = scores + keys.index_select(0, elements)
    return relaxed_candidates(scores, inputs)


def relaxed_candidates(keys: Tensor, inputs: Inputs) -> Tensor:
    """Σ_c p_c · candidate_c with p = softmax(keys / τ) over the candidates."""
    # In fp32, candidates further behind would only be slow, see above.
    lowest = MIN_EXPONENT if keys.dtype == torch.float32 else None
    probability = ((keys - keys.detach().amax(0)) / inputs.draw.tau).clamp(lowest).softmax(0)
    keeping = _keeping(inputs.pattern, keys.device)
    return torch.stack([probability.index_select(0, those).sum(0) for those in keeping])


@cache
def candidates(pattern: NMPattern, device: torch.device) -> Tensor:
    """The elements each candidate keeps, int64 [C, N], candidates in lexicographic order."""
    return torch.tensor(list(combinations(range(pattern.m), pattern.n)), device=device)


@cache
def _keeping(pattern: NMPattern, device: torch.device) -> Tensor:
    """The candidates that keep each element, int64 [M, C * N / M]."""
    kept = candidates(pattern, device)
    return torch.stack([(kept == i).any(1).nonzero().squeeze(1) for i in range(pattern.m)])
