"""The joint relaxation in plain tensor operations: the fallback of every device, chunk by chunk.

Legend as in `top_k_eager`; C = C(M, N) candidates of a group.
"""

from torch import Tensor

from roi_lightning.samplers.base import DrawArgs
from roi_lightning.samplers.categorical_eager import (
    candidates,
    probabilities,
    soft_mask,
    soft_mask_gradient,
)
from roi_lightning.samplers.top_k_eager import elements_of, noisy_keys, row_chunks


def masked_weight(weight: Tensor, logits: Tensor, args: DrawArgs, out: Tensor) -> bool:
    """Write weight * mask into `out`; see `dispatch.Kernel`."""
    for rows in row_chunks(weight):
        mask = soft_mask(_probabilities(logits, rows, args), args.n, args.m)
        # The product is taken in fp32 and rounded once to the weight's dtype.
        elements_of(out[rows], args).copy_(mask * elements_of(weight[rows], args).float())
    return True


def logits_gradient(
    weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, args: DrawArgs, out: Tensor
) -> bool:
    """Write the gradient of the logits into `out`; see `dispatch.Kernel`."""
    for rows in row_chunks(weight):
        elements = elements_of(weight[rows], args).float()
        of_mask = elements_of(grad[rows], args).float() * elements
        drawn = _probabilities(logits, rows, args)
        if args.kept_norm:
            of_mask -= factor * soft_mask(drawn, args.n, args.m) * elements.square()
        of_scores = soft_mask_gradient(drawn, of_mask, args.tau, args.n, args.m)
        elements_of(out[rows], args).copy_(soft_mask(of_scores, args.n, args.m).div_(args.lam))
    return True


def _probabilities(logits: Tensor, rows: slice, args: DrawArgs) -> Tensor:
    """The candidates' probabilities in some rows, fp32 [C, E]: a candidate scores the sum of its elements' keys."""
    keys = noisy_keys(logits, rows, args)
    kept = candidates(args.n, args.m, keys.device)
    scores = keys.index_select(0, kept[:, 0])
    for elements in kept.T[1:]:
        scores += keys.index_select(0, elements)
    return probabilities(scores, args.tau)
