"""Linear layers on processors that have no instructions for the numbers they hold: products in fp32, rounded once.

Where a processor can't multiply half-width numbers, PyTorch widens them within its products, at a third of the speed
of products in fp32 and less. Weights and activations keep their type here, and so does what is kept for the
backward pass; only the weights of one product and a slice of its rows are widened at a time.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

# Any of these will do; processors of other kinds list none of them.
_INSTRUCTIONS: Final = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "avx10_2", "fp16_arith"),
}
# Rows that pay for widening a matrix.
_ROWS: Final = 24
# Numbers of a widened slice: 24 MiB, see `loss`.
_SLICE: Final = 6 << 20
_Model = TypeVar("_Model", bound=nn.Module)


class WideLinear(nn.Linear):
    """An `nn.Linear` whose product may be taken in fp32; see `linear`."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def widen_products(lm: _Model) -> _Model:
    """Have the linear layers of a model, in place, take their products as `linear` does."""
    for module in lm.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear
    return lm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, in fp32 where this processor has no instructions for the numbers' type.

    Fewer than 24 rows do not pay for it.

    Args:
        x: [..., in].
        weight: [out, in], of the same dtype.
        bias: [out] or None.

    Returns:
        [..., out] of the same dtype.
    """
    if is_widened(x) and x.dtype == weight.dtype and x.numel() >= _ROWS * x.shape[-1]:
        wide: Tensor = _WideProduct.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return wide
    return F.linear(x, weight, bias)


def is_widened(x: Tensor) -> bool:
    """Whether products of a tensor are taken in fp32."""
    # Not while a step is played through without numbers, for whichever device.
    return type(x) is Tensor and x.device.type == "cpu" and is_slow(x.dtype)


@cache
def is_slow(dtype: torch.dtype) -> bool:
    """Whether this processor is known to have no instructions for products of a dtype."""
    able = getattr(torch.cpu, "get_capabilities", dict[str, Any])()  # older releases can't tell
    listed = [able[name] for name in _INSTRUCTIONS.get(dtype, ()) if name in able]
    return bool(listed) and not any(listed)


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide, wide_bias = weight.float(), None if bias is None else bias.float()
        out = x.new_empty(*x.shape[:-1], len(weight))
        for rows, to in _slices(x, out):
            to.copy_(F.linear(rows.float(), wide, wide_bias))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,), (of_x, of_weight, of_bias) = grads, ctx.needs_input_grad
        return (
            _gradient_of_x(grad, x, weight) if of_x else None,
            _gradient_of_weight(grad, x, weight) if of_weight else None,
            grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype) if of_bias else None,
        )


def _gradient_of_x(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    out, wide = torch.empty_like(x, memory_format=torch.contiguous_format), weight.float()
    for rows, to in _slices(grad, out):
        to.copy_(rows.float() @ wide)
    return out


def _gradient_of_weight(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(weight.shape)
    for rows, others in _slices(grad, x):
        total.addmm_(rows.float().t(), others.float())
    return total.to(weight.dtype)


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of all, so that no wide copy of a product with a vocabulary is ever whole."""
    size = max(1, _SLICE // max(tensor.shape[-1] for tensor in tensors))
    return zip(*(tensor.reshape(-1, tensor.shape[-1]).split(size) for tensor in tensors), strict=True)
