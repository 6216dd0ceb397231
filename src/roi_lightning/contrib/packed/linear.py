"""Linear layers for decoding: of packed 2:4 weights, by an operator that compilers leave alone, and of dense ones."""

from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from typing_extensions import override

from roi_lightning.contrib.packed import kernels
from roi_lightning.contrib.packed.format import Packed, unpack
from roi_lightning.errors import UserError

# Rows up to which a CPU multiplies them by the packed matrix; beyond, writing the dense one out pays.
MAX_SMALL_BATCH: Final = 112
_MAX_DENSE_BATCH: Final = 8


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` or GPT-2's `Conv1D` with a 2:4 weight; frozen.

    With int8 weights it computes in the dtype of what it is given, and casting it leaves weights and scales.

    Args:
        packed: The weight.
        bias: [out] or None.

    Attributes:
        weight: The kept weights, `Packed.values`; a buffer, named as in packed directories like the others.
        weight_indices: `Packed.indices`; a buffer.
        weight_scales: `Packed.scales`; a buffer, or None.
        bias: A buffer, or None.
    """

    weight: Tensor
    weight_indices: Tensor
    weight_scales: Tensor | None
    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.register_buffer("weight", packed.values)
        self.register_buffer("weight_indices", packed.indices)
        self.register_buffer("weight_scales", packed.scales)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def packed(self) -> Packed:
        """The weight."""
        return Packed(self.weight, self.weight_indices, self.weight_scales)

    def unpacked(self, dtype: torch.dtype) -> nn.Linear:
        """A dense layer that computes the same, its weights in a dtype."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(unpack(self.packed, dtype), requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear

    @override
    def forward(self, x: Tensor) -> Tensor:
        held: dict[str, Any] = self._buffers  # attributes of a module take a microsecond each
        return packed_linear(x, held["weight"], held["weight_indices"], held["weight_scales"], held["bias"])

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = self.weight_scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if scales is not None:
            self.weight_scales = scales.to(self.weight.device)
        return self

    @override
    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def packed_linear(
    x: Tensor, values: Tensor, indices: Tensor, scales: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`torch.nn.functional.linear` with a packed weight, differentiable in x alone.

    Args:
        x: [..., in].
        values: See `Packed`; of the same dtype, or int8.
        indices: See `Packed`.
        scales: See `Packed`.
        bias: [out] or None; of the same dtype.

    Returns:
        [..., out] of the same dtype.

    Raises:
        UserError: If x is of another dtype than the weight, or than the bias of an int8 weight, on another device, or
            has another number of inputs.
    """
    if (x.requires_grad and is_grad_enabled()) or is_compiling():
        result: Tensor = _operator(x, values, indices, scales, bias)
        return result
    return _product(x, values, indices, scales, bias)


def _product(
    x: Tensor, values: Tensor, indices: Tensor, scales: Tensor | None, bias: Tensor | None
) -> Tensor:
    # Decoding notices every microsecond spent here: a model has hundreds of layers.
    inputs = x.shape[-1]
    model = values if scales is None else bias  # which has the dtype of the whole model
    if (
        inputs != 2 * values.shape[1]
        or (model is not None and x.dtype != model.dtype)
        or x.is_cpu != values.is_cpu
    ):
        raise _misfit(x, values, model)
    if x.is_cpu:
        is_small = x.numel() <= inputs * MAX_SMALL_BATCH
        if is_small and (y := kernels.multiply(x, values, indices, scales, bias)) is not None:
            return y
    elif x.device != values.device:
        raise _misfit(x, values, model)
    if scales is None:
        return F.linear(x, kernels.unpack(values, indices, None), bias)
    # In 16 bits int8 times a power of two is exact; what is left of the scale goes to the outputs.
    left, _ = scales.frexp()
    y = F.linear(x, kernels.unpack(values, indices, scales / left, x.dtype)) * left
    return (y if bias is None else y + bias).to(x.dtype)


def _misfit(x: Tensor, values: Tensor, model: Tensor | None) -> UserError:
    inputs, dtype = 2 * values.shape[1], (values if model is None else model).dtype
    return UserError(
        f"a packed layer of {dtype} on {values.device} with {inputs} inputs was given {x.dtype} on {x.device} "
        f"with {x.shape[-1]}; move and cast the model as a whole, and run it without autocast"
    )


@torch.library.custom_op("roi_lightning::packed_linear", mutates_args=())
def _operator(
    x: Tensor, values: Tensor, indices: Tensor, scales: Tensor | None, bias: Tensor | None
) -> Tensor:
    return _product(x, values, indices, scales, bias)


@_operator.register_fake
def _shape(x: Tensor, values: Tensor, indices: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0])


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return F.linear(grad, unpack(Packed(*ctx.saved_tensors), grad.dtype).t()), None, None, None, None


_operator.register_autograd(_backward, setup_context=_remember)


class SmallBatchLinear(nn.Linear):
    """An `nn.Linear` that multiplies up to eight rows on a CPU, without gradient, by this project's kernel.

    Args:
        linear: Whose weight and bias it shares.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    @override
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if (
            not is_compiling()
            and input.is_cpu
            and weight.is_cpu
            and input.dtype == weight.dtype
            and 0 < input.numel() <= _MAX_DENSE_BATCH * weight.shape[1]
            and input.shape[-1] == weight.shape[1]
            and weight.is_contiguous()
            and not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
            and (y := kernels.multiply_dense(input, weight, bias)) is not None
        ):
            return y
        return F.linear(input, weight, bias)


def speed_up_dense(lm: nn.Module) -> None:
    """Put a `SmallBatchLinear` in the place of every plain linear layer of a model that has no hooks."""
    made: dict[nn.Module, SmallBatchLinear] = {}
    for name, module in list(lm.named_modules(remove_duplicate=False)):
        if type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks:
            made.setdefault(module, SmallBatchLinear(module))
            lm.set_submodule(name, made[module])
