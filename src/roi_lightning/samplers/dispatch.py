"""Dispatch of a draw to its backend: C++ on CPUs, Triton on GPUs, eager torch elsewhere and as the fallback.

Draws are operators of torch: the weight under a sampled mask, differentiable in the logits. They keep nothing but
their arguments for the backward pass, which draws the same noise again. A device's own kernel may decline (no
compiler, an unknown dtype, too large a group); the eager one, which runs everywhere, is its fallback.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol, get_type_hints

import torch
from torch import Tensor
from torch.library import custom_op

from roi_lightning.samplers import (
    categorical_eager,
    cpu_kernels,
    subset_eager,
    top_k_eager,
    triton_launch,
)
from roi_lightning.samplers.base import DrawArgs, KeptNorm

# With fewer weights a layer takes less time than starting compiled code is worth.
_MIN_COMPILED: Final = 1 << 16
_NUMBERS: Final = ", ".join(f"{kind.__name__} {name}" for name, kind in get_type_hints(DrawArgs).items())


Operator = Callable[..., tuple[Tensor, Tensor]]


class Kernel(Protocol):
    """Both passes of a sampler; each returns whether it could be done. All tensors are contiguous."""

    def masked_weight(self, weight: Tensor, logits: Tensor, args: DrawArgs, out: Tensor) -> bool:
        """Write weight * mask into `out`.

        Args:
            weight: [out, in], any float dtype.
            logits: fp32.
            args: The draw.
            out: Like the weight.
        """

    def logits_gradient(
        self, weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, args: DrawArgs, out: Tensor
    ) -> bool:
        """Write the gradient of the logits into `out`.

        Args:
            weight: [out, in], any float dtype.
            logits: fp32.
            grad: Of the masked weight, like the weight.
            factor: c of the kept norm's gradient, -c * mask * weight**2: fp32 scalar; 0 without a kept norm.
            args: The draw.
            out: Like the logits.
        """


def masked_weight(
    operator: Operator, weight: Tensor, logits: Tensor, args: DrawArgs, kept_norm: KeptNorm | None
) -> Tensor:
    """Apply one of this module's operators, and count the squared norm of what it gives.

    Args:
        operator: `top_k_weight`, `categorical_weight` or `subset_weight`.
        weight: [out, in], any float dtype.
        logits: fp32.
        args: The draw.
        kept_norm: What counts the norm, if anything does.

    Returns:
        The weight under the drawn mask, differentiable in the logits; shape and dtype of `weight`.
    """
    drawn, squared_norm = operator(weight.contiguous(), logits.contiguous(), *args)
    if kept_norm is not None:
        kept_norm.add(squared_norm)
    return drawn


def _define(name: str, eager: Kernel, **kernels: Kernel) -> Operator:
    """Register a sampler's operator, and that of its backward pass.

    Args:
        name: Of the sampler.
        eager: Runs on every device.
        kernels: The faster ones, by device.
    """
    forward = custom_op(
        f"roi_lightning::{name}_weight",
        _forward(eager, eager),
        mutates_args=(),
        schema=f"(Tensor weight, Tensor logits, {_NUMBERS}) -> (Tensor, Tensor)",
    )
    backward = custom_op(
        f"roi_lightning::{name}_gradient",
        _backward(eager, eager),
        mutates_args=(),
        schema=f"(Tensor weight, Tensor logits, Tensor grad, Tensor factor, {_NUMBERS}) -> Tensor",
    )
    for device, kernel in kernels.items():
        forward.register_kernel(device)(_forward(kernel, eager))
        backward.register_kernel(device)(_backward(kernel, eager))
    forward.register_fake(lambda weight, *_: (torch.empty_like(weight), _scalar(weight)))
    backward.register_fake(lambda _, logits, *__: torch.empty_like(logits))

    def differentiate(ctx: Any, grad: Tensor, norm_grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, logits = ctx.saved_tensors
        of_logits = backward(weight, logits, grad.contiguous(), norm_grad * -2.0, *ctx.args)
        return None, of_logits, *(None for _ in ctx.args)

    forward.register_autograd(differentiate, setup_context=_save)
    return forward


def _forward(kernel: Kernel, eager: Kernel) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(weight: Tensor, logits: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
        args, out = DrawArgs(*numbers), torch.empty_like(weight)
        if not (_pays(weight, args) and kernel.masked_weight(weight, logits, args, out)):
            eager.masked_weight(weight, logits, args, out)
        if not args.kept_norm:
            return out, _scalar(weight)
        return out, torch.linalg.vector_norm(out, dtype=torch.float32).square()

    return run


def _backward(kernel: Kernel, eager: Kernel) -> Callable[..., Tensor]:
    def run(weight: Tensor, logits: Tensor, grad: Tensor, factor: Tensor, *numbers: Any) -> Tensor:
        args, out = DrawArgs(*numbers), torch.empty_like(logits)
        if not (_pays(weight, args) and kernel.logits_gradient(weight, logits, grad, factor, args, out)):
            eager.logits_gradient(weight, logits, grad, factor, args, out)
        return out

    return run


def _pays(weight: Tensor, args: DrawArgs) -> bool:
    return args.compiled and weight.numel() >= _MIN_COMPILED


def _scalar(weight: Tensor) -> Tensor:
    return weight.new_zeros((), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weight, logits, *ctx.args = inputs
    ctx.save_for_backward(weight, logits)


top_k_weight = _define("top_k", top_k_eager, cpu=cpu_kernels.top_k, cuda=triton_launch.top_k)
categorical_weight = _define(
    "categorical", categorical_eager, cpu=cpu_kernels.categorical, cuda=triton_launch.categorical
)
subset_weight = _define("subset", subset_eager, cpu=cpu_kernels.subset, cuda=triton_launch.subset)
# Of the backward passes.
GRADIENTS: Final = (
    torch.ops.roi_lightning.top_k_gradient.default,
    torch.ops.roi_lightning.categorical_gradient.default,
    torch.ops.roi_lightning.subset_gradient.default,
)
