"""SparseGPT: prune column after column; the columns that follow compensate for each loss.

The layer's error on the calibration inputs is quadratic in its weights, with the Hessian H = 2/n Σ x xᵀ.
Pruning a column costs w² / [H⁻¹]ⱼⱼ if the columns after it change as they best do while all columns before it stay
fixed; the rows of the upper Cholesky factor of H⁻¹ hold exactly these changes.
"""

import warnings
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.oneshot.calibration_statistics import HessianObserver, InputObserver, exact_products
from roi_lightning.oneshot.methods import CalibratedMethod, LayerResult

_RETRIES: Final = 3


class SparseGPT(CalibratedMethod):
    """Second-order pruning with compensation.

    A row whose compensated weights would do worse on the calibration inputs than the original ones under the mask
    keeps the original ones, so that a layer's error is never above that of the mask alone. The published code has no
    such rule, and reads other windows (see `Wanda`).

    Args:
        update_weights: Keep the compensated weights; otherwise only the mask they led to.
        damping: Added to the diagonal of H, as a fraction of its mean; tenfold after each failed factorisation.
        block_size: Columns after which the remaining ones are updated; rounded down to whole groups, at least one.

    Raises:
        UserError: If a number is out of range; later, if H can't be factorised however damped.
    """

    observer = HessianObserver

    def __init__(self, update_weights: bool = True, damping: float = 0.01, block_size: int = 128) -> None:
        if damping <= 0 or block_size < 1:
            raise UserError(f"damping {damping} must be above 0 and block_size {block_size} at least 1")
        self.updates_weights, self.damping, self.block_size = update_weights, damping, block_size

    @override
    def facts(self) -> dict[str, object]:
        return {
            "update_weights": self.updates_weights,
            "damping": self.damping,
            "block_size": self.block_size,
        }

    @override
    def prune(
        self, weight: Tensor, inputs: InputObserver | None, pattern: NMPattern, name: str
    ) -> LayerResult:
        assert isinstance(inputs, HessianObserver)
        with exact_products():
            hessian = inputs.total * (2 / inputs.tokens)
            factor = self._factor(hessian, name)
            mask, columns = _eliminate(weight, hessian, factor, pattern, self.block_size)
            if not self.updates_weights:
                return LayerResult(mask)
            return LayerResult(mask, _no_worse(weight, mask, columns, hessian))

    def _factor(self, hessian: Tensor, name: str) -> Tensor:
        """The upper Cholesky factor U of H⁻¹ = UᵀU, [in, in]."""
        diagonal = torch.where(hessian.diagonal() == 0, 1, hessian.diagonal())
        for attempt in range(_RETRIES + 1):
            damping = self.damping * 10**attempt
            damped = hessian.clone()
            damped.diagonal().copy_(diagonal + damping * diagonal.mean())
            factor = _inverse_factor(damped)
            if factor is not None:
                if attempt:
                    warnings.warn(
                        f"{name}: its Hessian could be factorised only with damping {damping:g} instead of "
                        f"{self.damping:g}; more calibration windows would help",
                        stacklevel=2,
                    )
                return factor
        raise UserError(
            f"{name}: its Hessian can't be factorised, not even with damping {damping:g}; "
            "give more calibration windows, or leave the layer out"
        )


def _inverse_factor(hessian: Tensor) -> Tensor | None:
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if failed or not upper.isfinite().all() else upper


def _eliminate(
    weight: Tensor, hessian: Tensor, factor: Tensor, pattern: NMPattern, block_size: int
) -> tuple[Tensor, Tensor]:
    """Visit all columns from left to right.

    Returns:
        The mask, boolean [out, in], and the compensated weights, fp32 [out, in], zero where pruned.
    """
    # Transposed, so that a column's weights lie together; always a copy, for it is worked on in place.
    columns = weight.T.to(torch.float32, copy=True).contiguous()
    dead = hessian.diagonal() == 0
    mask = torch.empty(columns.shape, dtype=torch.bool, device=columns.device)
    step = max(block_size // pattern.m, 1) * pattern.m
    for start in range(0, len(columns), step):
        block = slice(start, min(start + step, len(columns)))
        losses = _eliminate_block(columns[block], mask[block], dead[block], factor[block, block], pattern)
        columns[block.stop :] -= factor[block, block.stop :].T @ losses
    return mask.T, columns.T * mask.T


def _eliminate_block(
    columns: Tensor, mask: Tensor, dead: Tensor, factor: Tensor, pattern: NMPattern
) -> Tensor:
    """Prune a block in place; returns every column's loss over its diagonal, [columns, out]."""
    losses = torch.zeros_like(columns)
    diagonal = factor.diagonal()
    for i in range(len(columns)):
        if i % pattern.m == 0:
            group = slice(i, i + pattern.m)
            saliency = (columns[group] / diagonal[group, None]).square()
            # An input that never fires is the first to go.
            mask[group] = pattern.top(saliency.masked_fill(dead[group, None], -1), dim=0)
        losses[i] = (columns[i] / diagonal[i]).masked_fill(mask[i], 0)
        columns[i:] -= torch.outer(factor[i, i:], losses[i])
    return losses


def _no_worse(weight: Tensor, mask: Tensor, updated: Tensor, hessian: Tensor) -> Tensor:
    """The updated weights in the weight's dtype, except rows that are better off without the update."""
    plain = weight.masked_fill(~mask, 0)
    rounded = updated.to(weight.dtype).masked_fill(~mask, 0)
    better = _row_errors(weight, rounded, hessian) <= _row_errors(weight, plain, hessian)
    return torch.where(better[:, None], rounded, plain)


def _row_errors(weight: Tensor, pruned: Tensor, hessian: Tensor) -> Tensor:
    """The squared error that pruning makes in every output, fp32 [out]; half of it is the mean over tokens."""
    difference = pruned.float() - weight.float()
    return ((difference @ hessian) * difference).sum(1)
