"""Kernels through `torch.compile`, where this machine can: for GPUs, and where `native` fails.

A sampler writes its passes over the weights as a function of plain tensors; compiled, it runs once over
memory instead of some twenty times. Compiling takes seconds, once per machine (torch keeps the result), so
small layers run eagerly; a machine without a compiler does everything eagerly and says so once.
"""

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from torch import Tensor

_log = logging.getLogger(__name__)
# Below this many weights a layer takes less time than starting the compiled code is worth.
WORTH_COMPILING: Final = 1 << 16
# One kernel is specialised per pattern, dtype and orientation; a process meets few of them.
_VARIANTS: Final = 64

Kernel = Callable[..., None]


class _Switch:
    """Off for good after the first failure."""

    broken = False


def run_compiled(kernel: Kernel, *args: Tensor | int | float | bool) -> bool:
    """Run a kernel compiled.

    Args:
        kernel: A function that writes its result into one of its tensors, the same every time it runs.
        args: Its arguments; sizes may vary freely, everything that is no tensor is compiled in.

    Returns:
        Whether it ran; False if this machine can't compile it, and then the caller does the work eagerly.
    """
    if _Switch.broken:
        return False
    try:
        _compiled(kernel)(*args)
    except Exception as error:  # whatever a compiler may fail with
        _Switch.broken = True
        _log.warning("samplers run eagerly, several times slower: torch.compile failed (%s)", _reason(error))
        return False
    return True


def _reason(error: Exception) -> str:
    """The first line that says something: wrappers announce the real one with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)


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
