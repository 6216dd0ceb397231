"""Dense layers that read their weights as fast as packed ones where they multiply small batches."""

from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from typing_extensions import override

from roi_lightning.runtime import cpu_kernels

_MAX_SMALL_BATCH: Final = 8
_Model = TypeVar("_Model", bound=nn.Module)


class SmallBatchLinear(nn.Linear):
    """An `nn.Linear` that multiplies up to eight rows on a CPU, without gradient, by this project's kernel."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if (
            not is_compiling()
            and input.is_cpu
            and weight.is_cpu
            and input.dtype == weight.dtype
            and 0 < input.numel() <= _MAX_SMALL_BATCH * weight.shape[1]
            and input.shape[-1] == weight.shape[1]
            and weight.is_contiguous()
            and not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
            and (y := cpu_kernels.multiply_dense(input, weight, bias)) is not None
        ):
            return y
        return F.linear(input, weight, bias)


def speed_up_dense(lm: _Model) -> _Model:
    """Turn the plain linear layers of a model into `SmallBatchLinear`, in place."""
    for module in lm.modules():
        if type(module) is nn.Linear:
            module.__class__ = SmallBatchLinear
    return lm
