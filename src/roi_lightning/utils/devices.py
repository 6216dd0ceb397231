"""Choose the device of a command; how much memory one has; set the floating-point mode of the CPU's threads."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from roi_lightning.errors import UserError
from roi_lightning.utils.cpp_extension import openmp

_REGION: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL: Final = ctypes.CFUNCTYPE(None, _REGION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def choose_device(name: str = "auto") -> torch.device:
    """The device of a name.

    Args:
        name: `cpu`, `cuda`, `cuda:N`, or `auto` for a GPU where there is one.

    Raises:
        UserError: If the name is none of these or the machine has no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if name in ("cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))):
        return torch.device(name)
    raise UserError(f"--device {name!r}: use auto, cpu, cuda or cuda:N; this machine has {gpus} GPUs")


def memory_of(device: torch.device) -> int:
    """Bytes that a device has; of a CPU, what this machine or its container may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return min(installed, int(allowed)) if allowed.isdigit() else installed


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held on a device: a GPU's tensors, on a CPU the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # KiB on Linux


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Flush denormals to zero in this thread and torch's OpenMP threads; afterwards the setting is what it was.

    Annealed softmaxes make many denormals, which cost a CPU a hundred times as much as other values.
    """
    before = sys.float_info.min / 2 == 0  # torch has a setter and no getter
    in_every_thread(lambda: torch.set_flush_denormal(True))
    try:
        yield
    finally:
        in_every_thread(lambda: torch.set_flush_denormal(before))


def in_every_thread(act: Callable[[], object]) -> None:
    """Call something in this thread and, where torch runs on OpenMP, in each of its threads."""
    threads = torch.get_num_threads()
    if threads > 1 and openmp():
        _PARALLEL(openmp())(_REGION(lambda _: act()), None, threads, 0)
    else:
        act()
