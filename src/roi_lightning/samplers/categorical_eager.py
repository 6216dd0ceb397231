"""MaskLLM's sampler in plain tensor operations: the fallback of every device, slice by slice.

Legend: C = C(M, N) candidates of a group, M = its elements, either of them along the first axis (see `top_k_eager`),
G = groups.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from roi_lightning.samplers.base import DrawArgs
from roi_lightning.samplers.noise import gumbel
from roi_lightning.samplers.top_k_eager import MIN_EXPONENT, chunk_size


def masked_weight(weight: Tensor, logits: Tensor, args: DrawArgs, out: Tensor) -> bool:
    """Write weight * mask into `out`; see `dispatch.Kernel`."""
    logits, weight, out = (_by_group(x, args) for x in (logits, weight, out))
    for part in _slices(logits):
        mask = soft_mask(_drawn(logits, part, args), args.n, args.m)
        # The product is taken in fp32 and rounded once to the weight's dtype.
        out[part] = (mask * weight[part].T.float()).T
    return True


def logits_gradient(
    weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, args: DrawArgs, out: Tensor
) -> bool:
    """Write the gradient of the logits into `out`; see `dispatch.Kernel`."""
    logits, weight, grad, out = (_by_group(x, args) for x in (logits, weight, grad, out))
    for part in _slices(logits):
        elements = weight[part].T.float()
        of_mask = grad[part].T.float() * elements
        drawn = _drawn(logits, part, args)
        if args.kept_norm:
            of_mask -= factor * soft_mask(drawn, args.n, args.m) * elements.square()
        of_keys = soft_mask_gradient(drawn, of_mask, args.tau, args.n, args.m)
        out[:, part] = of_keys.div_(args.lam)
    return True


def _by_group(tensor: Tensor, args: DrawArgs) -> Tensor:
    """Contiguous logits as a view [C, G]; contiguous tensors of the weight's shape as one [G, M]."""
    return tensor.flatten(1) if tensor.ndim == 3 else tensor.view(-1, args.m)


def _slices(logits: Tensor) -> Iterator[slice]:
    """Nearly equal slices of the groups of logits [C, G]."""
    groups = logits.shape[1]
    count = min(groups, -(-logits.numel() // chunk_size(logits)))
    for i in range(count):
        yield slice(i * groups // count, (i + 1) * groups // count)


def _first_index(logits: Tensor, part: slice) -> int:
    """The noise index of a slice's first logit, wrapped to int32 as the others are."""
    first: int = part.start * len(logits)
    return (first + (1 << 31)) % (1 << 32) - (1 << 31)


def _drawn(logits: Tensor, part: slice, args: DrawArgs) -> Tensor:
    """The candidates' probabilities in a slice of the groups, fp32 [C, g]."""
    own = logits[:, part]
    groups = torch.arange(own.shape[1], dtype=torch.int32, device=logits.device)
    among = torch.arange(len(own), dtype=torch.int32, device=logits.device).unsqueeze(1)
    noise = gumbel(groups * len(own) + _first_index(logits, part) + among, (args.key0, args.key1))
    return probabilities(noise.add_(own / args.lam), args.tau)


def probabilities(keys: Tensor, tau: float) -> Tensor:
    """Each candidate's probability, softmax(keys / τ) over the candidates.

    Args:
        keys: κ φ + g, [C, ...], fp32 or fp64; overwritten.
        tau: Softmax temperature τ.
    """
    # In fp32, candidates further behind would only be slow: see `top_k_eager`.
    lowest = MIN_EXPONENT if keys.dtype == torch.float32 else -torch.inf
    keys.sub_(keys.amax(0)).div_(tau).clamp_(min=lowest).exp_()
    return keys.div_(keys.sum(0))


def soft_mask(probability: Tensor, n: int, m: int) -> Tensor:
    """Σ_c p_c · candidate_c.

    Args:
        probability: From `probabilities`, [C, ...].
        n: Elements a candidate keeps.
        m: Elements of a group.

    Returns:
        [M, ...], summing to N along the first axis.
    """
    keeping = _keeping(n, m, probability.device)
    return torch.stack([probability.index_select(0, those).sum(0) for those in keeping])


def soft_mask_gradient(probability: Tensor, grad: Tensor, tau: float, n: int, m: int) -> Tensor:
    """The gradient of <mask, grad> with respect to the keys.

    Args:
        probability: From `probabilities`, [C, ...].
        grad: Of the mask, [M, ...].
        tau: Softmax temperature τ.
        n: Elements a candidate keeps.
        m: Elements of a group.

    Returns:
        [C, ...].
    """
    kept = candidates(n, m, probability.device)
    of_probability = grad.index_select(0, kept[:, 0])
    for elements in kept.T[1:]:
        of_probability += grad.index_select(0, elements)
    return of_probability.sub_((probability * of_probability).sum(0)).mul_(probability).div_(tau)


@cache
def candidates(n: int, m: int, device: torch.device) -> Tensor:
    """The elements each candidate keeps, int64 [C, N], candidates in lexicographic order."""
    return torch.tensor(list(combinations(range(m), n)), device=device)


@cache
def _keeping(n: int, m: int, device: torch.device) -> Tensor:
    """The candidates that keep each element, int64 [M, C * N / M]."""
    kept = candidates(n, m, device)
    return torch.stack([(kept == i).any(1).nonzero().squeeze(1) for i in range(m)])
