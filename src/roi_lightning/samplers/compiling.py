"""Kernels through `torch.compile`, where this machine can: for GPUs, and where `native` fails.

A sampler writes its passes over the weights as a function of plain tensors; compiled, it runs once over
memory instead of some twenty times. Compiling takes seconds, once per machine (torch keeps the result), so
small layers run eagerly; a machine without a compiler does everything eagerly and says so once.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from roi_lightning.fallible import Fallible

# Below this many weights a layer takes less time than starting the compiled code is worth.
WORTH_COMPILING: Final = 1 << 16
# One kernel is specialised per pattern, dtype and orientation; a process meets few of them.
_VARIANTS: Final = 64

Kernel = Callable[..., None]

kernels = Fallible("samplers run eagerly, several times slower: torch.compile failed", logging.WARNING)


def run_compiled(kernel: Kernel, *args: Tensor | int | float | bool) -> bool:
    """Run a kernel compiled.

    Args:
        kernel: A function that writes its result into one of its tensors, the same every time it runs.
        args: Its arguments; sizes may vary freely, everything that is no tensor is compiled in.

    Returns:
        Whether it ran; False if this machine can't compile it, and then the caller does the work eagerly.
    """
    return kernels.try_to(lambda: _compiled(kernel)(*args))


def numbers_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A small tensor for a kernel; the host does not wait for a GPU to take it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@cache
def _compiled(kernel: Kernel) -> Kernel:
    with warnings.catch_warnings():
        # torch's compiler meets torch's own deprecated parts when it is first imported.
        warnings.simplefilter("ignore")
        import torch._dynamo.config as dynamo
        import torch._inductor.compile_fx
        import torch._inductor.config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)
    dynamo.specialize_float = True  # or constants of a module are first traced as numbers and then as inputs
    options: dict[str, Any] = {}
    if hasattr(inductor.cpp, "enable_tiling_heuristics"):
        # It counts strided loads and then gives up on vectors; here they are few beside the arithmetic.
        options["cpp.enable_tiling_heuristics"] = False
    compiled: Kernel = torch.compile(kernel, dynamic=True, fullgraph=True, options=options)
    return compiled
