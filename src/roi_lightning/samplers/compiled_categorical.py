"""MaskLLM's sampler in one pass over memory each way, through `torch.compile`: for GPUs.

The arithmetic of `categorical_eager`, candidate by candidate: a list holds one tensor per candidate or element of a
group, so that the compiler sees element-wise code and no reductions. Compiling takes seconds, once per machine (torch
keeps the result).

Legend: C = candidates of a group, M = its elements, G = groups. Arguments of both compiled functions: `ints` is int32
[noise index of the first group's first candidate, key, key], `floats` fp32 [1/λ, 1/τ, kept-norm gradient factor].
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from math import comb
from typing import Final

import torch
from torch import Tensor

from roi_lightning.samplers.base import DrawArgs
from roi_lightning.samplers.categorical_eager import by_group, first_index, slices
from roi_lightning.samplers.noise import gumbel_of
from roi_lightning.samplers.top_k_eager import MIN_EXPONENT
from roi_lightning.utils.cpp_extension import FastPath

# 28 candidates of 2:8 take some twenty seconds each way, 70 of 4:8 a minute.
_MAX_CANDIDATES: Final = 32
# One function is specialised per pattern and dtype; a process meets few of them.
_VARIANTS: Final = 64

_Tensors = list[Tensor]
_Function = Callable[..., None]

kernels = FastPath(
    "MaskLLM's sampler runs eagerly, several times slower: torch.compile failed", logging.WARNING
)


def masked_weight(weight: Tensor, logits: Tensor, args: DrawArgs, out: Tensor) -> bool:
    """Write weight * mask into `out`; see `ops.Kernel`."""
    if comb(args.m, args.n) > _MAX_CANDIDATES:
        return False
    logits, weight, out = (by_group(x, args) for x in (logits, weight, out))

    def run() -> None:
        for part in slices(logits):
            numbers = _numbers(logits, part, args)
            _compiled(_masked_weight)(logits[:, part], weight[part], out[part], *numbers, args.m, args.n)

    return kernels.attempt(run)


def logits_gradient(
    weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, args: DrawArgs, out: Tensor
) -> bool:
    """Write the gradient of the logits into `out`; see `ops.Kernel`."""
    if comb(args.m, args.n) > _MAX_CANDIDATES:
        return False
    logits, weight, grad, out = (by_group(x, args) for x in (logits, weight, grad, out))

    def run() -> None:
        for part in slices(logits):
            ints, floats = _numbers(logits, part, args)
            floats[2] = factor
            tensors = logits[:, part], weight[part], grad[part], out[:, part], ints, floats
            _compiled(_logits_gradient)(*tensors, args.m, args.n, args.kept_norm)

    return kernels.attempt(run)


def _numbers(logits: Tensor, part: slice, args: DrawArgs) -> tuple[Tensor, Tensor]:
    ints = _numbers_on(logits.device, [first_index(logits, part), args.key0, args.key1], torch.int32)
    return ints, _numbers_on(logits.device, [1 / args.lam, 1 / args.tau, 0.0], torch.float32)


def _numbers_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A small tensor; the host does not wait for a GPU to take it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@cache
def _compiled(function: _Function) -> _Function:
    with warnings.catch_warnings():
        # torch's compiler meets torch's own deprecated parts when it is first imported.
        warnings.simplefilter("ignore")
        import torch._dynamo.config as dynamo
        import torch._inductor.compile_fx

    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)
    dynamo.specialize_float = True  # or constants of a module are first traced as numbers and then as inputs
    compiled: _Function = torch.compile(function, dynamic=True, fullgraph=True)
    return compiled


def _masked_weight(
    logits: Tensor, weight: Tensor, out: Tensor, ints: Tensor, floats: Tensor, m: int, n: int
) -> None:
    """Write weight * soft mask into `out`.

    Args:
        logits: fp32 [C, G].
        weight: [G, M], any float dtype.
        out: Of the weight's shape and dtype.
        ints: See above.
        floats: See above.
        m: Elements of a group.
        n: Elements a candidate keeps.
    """
    candidates = _candidates(m, n)
    e, scale = _exponentials(logits, ints, floats, len(candidates))
    mask = _mask(e, scale, candidates, m)
    # Rounded once to the weight's dtype.
    out.copy_(torch.stack([x * weight[:, i].float() for i, x in enumerate(mask)], 1))


def _logits_gradient(
    logits: Tensor,
    weight: Tensor,
    grad: Tensor,
    out: Tensor,
    ints: Tensor,
    floats: Tensor,
    m: int,
    n: int,
    kept_norm: bool,
) -> None:
    """Write the gradient of the logits into `out`.

    Args:
        logits: fp32 [C, G].
        weight: [G, M], any float dtype.
        grad: Of the masked weight.
        out: fp32 [C, G].
        ints: See above.
        floats: See above.
        m: Elements of a group.
        n: Elements a candidate keeps.
        kept_norm: Whether there is a reward for kept norm.
    """
    candidates = _candidates(m, n)
    e, scale = _exponentials(logits, ints, floats, len(candidates))
    weights = [weight[:, i].float() for i in range(m)]
    of_mask = [grad[:, i].float() * w for i, w in enumerate(weights)]
    if kept_norm:
        mask = _mask(e, scale, candidates, m)
        of_mask = [g - floats[2] * x * w * w for g, x, w in zip(of_mask, mask, weights, strict=True)]
    of_probability = [_sum([of_mask[i] for i in kept]) for kept in candidates]
    mean = _sum([x * h for x, h in zip(e, of_probability, strict=True)]) * scale
    factor = scale * floats[0] * floats[1]
    of_logits = [(h - mean) * x * factor for x, h in zip(e, of_probability, strict=True)]
    out.copy_(torch.stack(of_logits))


def _candidates(m: int, n: int) -> list[tuple[int, ...]]:
    # The tracer takes a number for a constant only once something has counted up to it.
    return list(combinations(range(m), len(list(range(n)))))


def _exponentials(logits: Tensor, ints: Tensor, floats: Tensor, count: int) -> tuple[_Tensors, Tensor]:
    """Numbers in proportion to the candidates' probabilities, the largest of them 1, and one over their sum."""
    found, groups = logits.shape
    assert found == count
    first = torch.arange(groups, dtype=torch.int32, device=logits.device) * count + ints[0]
    noise = [gumbel_of(first + c, ints[1], ints[2]) for c in range(count)]
    keys = [logits[c] * floats[0] + g for c, g in enumerate(noise)]
    best = keys[0]
    for key in keys[1:]:
        best = torch.maximum(best, key)
    e = [((key - best) * floats[1]).clamp(min=MIN_EXPONENT).exp() for key in keys]
    return e, 1.0 / _sum(e)


def _mask(e: _Tensors, scale: Tensor, candidates: list[tuple[int, ...]], m: int) -> _Tensors:
    keep = [[x for x, kept in zip(e, candidates, strict=True) if i in kept] for i in range(m)]
    return [_sum(parts) * scale for parts in keep]


def _sum(parts: _Tensors) -> Tensor:
    """Their sum, added in order."""
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result
