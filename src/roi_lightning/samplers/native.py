"""The samplers' loops for processors, compiled once per machine with its own C++ compiler.

A sampler's passes over the weights are a hundred operations on every number, read once, kept in registers and written
once. `torch.compile` loads the members of a group one by one and takes the exact logarithms of a library, twice the
time in all. The sources are plain C++ without any header of torch's, so that a pattern compiles in a second or a few.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from roi_lightning.atomic import written_aside
from roi_lightning.samplers.fallible import Fallible

loops = Fallible("the samplers' C++ loops can't be compiled here", logging.INFO)
_SOURCES: Final = Path(__file__).with_name("cpp")
_COMPILERS: Final = ("c++", "g++", "clang++")
# Scheduled before registers are given out, the members of a group do not wait for each other: a fifth faster.
_SPEED: Final = ("-O3", "-fschedule-insns", "-fno-math-errno", "-fno-trapping-math")
_FLAGS: Final = ("-std=gnu++17", *_SPEED, "-fPIC", "-shared")
# Whichever a compiler takes first; the last one is slow and works everywhere.
_TUNED: Final = (("-march=native", "-ffp-contract=fast"), ("-mcpu=native", "-ffp-contract=fast"), ())
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
# Groups that one thread works on at least: fewer are not worth waking another for.
_LEAST_GROUPS: Final = 1 << 13
_LANES: Final = 16
_PATIENCE: Final = 300  # seconds for the compiler


@dataclass(frozen=True)
class Recipe:
    """What to compile.

    Attributes:
        source: File name in `cpp`.
        constants: Preprocessor constants, the weight's type among them.
    """

    source: str
    constants: tuple[tuple[str, int], ...]


def weight_type(weight: Tensor) -> int | None:
    """The number by which the sources know a weight's type; None if they don't."""
    return _DTYPES.get(weight.dtype)


def library(recipe: Recipe) -> ctypes.CDLL | None:
    """The compiled library; None if this machine can't make it, and then the caller takes a slower way."""
    return _load(recipe) if loops.try_to(lambda: _load(recipe)) else None


def run(
    function: "ctypes._NamedFuncPointer", tensors: tuple[Tensor, ...], groups: int, draw: ctypes.Structure
) -> None:
    """Call a kernel on all groups, in as many threads as torch uses.

    Args:
        function: Of a library; takes the tensors' addresses, the first group, the one after the last, the draw,
            OpenMP's entry point or null, and the number of threads.
        tensors: Contiguous.
        groups: How many.
        draw: What all groups share.
    """
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    threads = max(1, min(torch.get_num_threads(), groups // _LEAST_GROUPS))
    openmp = _openmp() if threads > 1 else None

    def work(start: int, end: int) -> None:
        function(*addresses, ctypes.c_int64(start), ctypes.c_int64(end), ctypes.byref(draw), openmp, threads)

    if threads == 1 or openmp:
        work(0, groups)
    else:
        size = -(-groups // threads // _LANES) * _LANES
        starts = range(0, groups, size)
        list(_workers(threads).map(work, starts, (min(start + size, groups) for start in starts)))


@cache
def _openmp() -> ctypes.c_void_p | None:
    """How torch's own OpenMP runs something in parallel; None if torch does not use it.

    Its threads wait for work busily for a while: others beside them would have to share the processors with them.
    """
    try:
        runtime = ctypes.CDLL(torch._C.__file__)  # with everything it was linked to
        return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError):
        return None


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="roi-sampler")


@cache
def _load(recipe: Recipe) -> ctypes.CDLL:
    compiler = _compiler()
    sources = sorted(_SOURCES.iterdir())
    parts = [recipe, _FLAGS, _TUNED, _machine(), _version(compiler), *(path.read_text() for path in sources)]
    name = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]
    file = _folder() / f"{Path(recipe.source).stem}-{name}.so"
    if not file.exists():
        with written_aside(file) as partial:
            _compile(compiler, recipe, partial)
    return ctypes.CDLL(str(file))


def _compile(compiler: str, recipe: Recipe, out: Path) -> None:
    constants = [f"-D{name}={value}" for name, value in recipe.constants]
    source = str(_SOURCES / recipe.source)
    for tuned in _TUNED:
        command = [compiler, *_FLAGS, *tuned, *constants, source, "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        if done.returncode == 0:
            return
    reason = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
    raise OSError(f"{compiler}: {reason}")


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        if found := shutil.which(name):
            return found
    raise OSError(f"none of {', '.join(_COMPILERS)} is installed")


@cache
def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout


@cache
def _machine() -> str:
    """What a library compiled for this processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _folder() -> Path:
    """Where compiled libraries are kept: ROI_CACHE, the user's cache, or where neither can be, a folder for now."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("ROI_CACHE") or Path(base) / "roi_lightning")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # the latter where nobody has a home
        pass
    return Path(_own_folder().name)


@cache
def _own_folder() -> "tempfile.TemporaryDirectory[str]":
    """Goes with the process."""
    return tempfile.TemporaryDirectory(prefix="roi_lightning-")
