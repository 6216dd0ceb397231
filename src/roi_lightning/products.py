"""Linear layers on processors that have no instructions for the numbers they hold: products in fp32, rounded once.

Where a processor can't multiply half-width numbers, PyTorch widens them within its products, at a third of the speed
of products in fp32 and less. Weights and activations keep their type here, and so does what is kept for the
backward pass; only the numbers of one product are widened at a time.
"""

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

    Args:
        x: [..., in].
        weight: [out, in], of the same dtype.
        bias: [out] or None.

    Returns:
        [..., out] of the same dtype.
    """
    # Not while a step is played through without numbers, for whichever device.
    if type(x) is Tensor and x.device.type == "cpu" and x.dtype == weight.dtype and is_slow(x.dtype):
        wide: Tensor = _WideProduct.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return wide
    return F.linear(x, weight, bias)


@cache
def is_slow(dtype: torch.dtype) -> bool:
    """Whether this processor is known to have no instructions for products of a dtype."""
    listed = [
        has for name, has in torch.cpu.get_capabilities().items() if name in _INSTRUCTIONS.get(dtype, ())
    ]
    return bool(listed) and not any(listed)


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, (of_x, of_weight, of_bias) = grads[0].float(), ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            (grad @ weight.float()).to(x.dtype) if of_x else None,
            (rows.t() @ x.float().reshape(-1, x.shape[-1])).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(weight.dtype) if of_bias else None,
        )
