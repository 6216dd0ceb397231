"""The product of a layer with a packed weight, by whichever way is there: one operator that compilers leave alone."""

from typing import Any, Final

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from roi_lightning.errors import UserError
from roi_lightning.products import linear
from roi_lightning.runtime import decode, gpu_products
from roi_lightning.runtime.packing import Packed, unpack

# Rows up to which a processor multiplies them by the packed matrix; beyond, writing the dense one out pays.
FEW: Final = 112


def packed_linear(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with a packed weight, differentiable in x alone.

    Args:
        x: [..., in].
        values: See `Packed`; of the same dtype.
        places: See `Packed`.
        bias: [out] or None.

    Returns:
        [..., out] of the same dtype.

    Raises:
        UserError: If x is of another dtype than the weight, or on another device, or has another number of inputs.
    """
    if (x.requires_grad and is_grad_enabled()) or is_compiling():
        result: Tensor = _operator(x, values, places, bias)
        return result
    return _product(x, values, places, bias)


def _product(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    # Decoding notices every microsecond spent here: a model has hundreds of layers.
    inputs = x.shape[-1]
    if inputs != 2 * values.shape[1] or x.dtype != values.dtype or x.is_cpu != values.is_cpu:
        raise _misfit(x, values)
    if x.is_cpu:
        if x.numel() <= inputs * FEW and (y := decode.multiply(x, values, places, bias)) is not None:
            return y
        return linear(x, _dense(values, places), bias)
    if x.device != values.device:
        raise _misfit(x, values)
    packed = Packed(values, places)
    return gpu_products.multiply(x, packed, bias) if x.is_cuda else linear(x, unpack(packed), bias)


def _dense(values: Tensor, places: Tensor) -> Tensor:
    dense = decode.unpack(values, places)
    return unpack(Packed(values, places)) if dense is None else dense


def _misfit(x: Tensor, values: Tensor) -> UserError:
    inputs = 2 * values.shape[1]
    return UserError(
        f"a packed layer of {values.dtype} on {values.device} with {inputs} inputs was given {x.dtype} on {x.device} "
        f"with {x.shape[-1]}; move and cast the model as a whole, and run it without autocast"
    )


@torch.library.custom_op("roi_lightning::packed_linear", mutates_args=())
def _operator(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, values, places, bias)


@_operator.register_fake
def _shape(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0])


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, places = ctx.saved_tensors
    return linear(grad, unpack(Packed(values, places)).t()), None, None, None


_operator.register_autograd(_backward, setup_context=_remember)
