"""Loops for processors, compiled once per machine with its own C++ compiler and run in torch's own threads.

The sources are plain C++ without any header of torch's, so that one compiles in a second or a few. Headers that all
of them share lie in `cpp`.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from roi_lightning.atomic import written_aside

_SHARED: Final = Path(__file__).with_name("cpp")
_COMPILERS: Final = ("c++", "g++", "clang++")
# Scheduled before registers are given out, the members of a group do not wait for each other: a fifth faster.
_SPEED: Final = ("-O3", "-fschedule-insns", "-fno-math-errno", "-fno-trapping-math")
_FLAGS: Final = ("-std=gnu++17", *_SPEED, "-fPIC", "-shared")
# Whichever a compiler takes first; the last one is slow and works everywhere.
_TUNED: Final = (("-march=native", "-ffp-contract=fast"), ("-mcpu=native", "-ffp-contract=fast"), ())
_PATIENCE: Final = 300  # seconds for the compiler

# From the first to before the last of what is to be done, OpenMP's entry point or 0, the number of threads.
Work = Callable[[int, int, int, int], object]
_REGION: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL: Final = ctypes.CFUNCTYPE(None, _REGION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@dataclass(frozen=True)
class Recipe:
    """What to compile.

    Attributes:
        source: The file; its headers lie in the same folder or are shared.
        constants: Preprocessor constants.
    """

    source: Path
    constants: tuple[tuple[str, int], ...]


@cache
def load(recipe: Recipe) -> ctypes.CDLL:
    """The compiled library.

    Raises:
        OSError: If this machine can't make it; the message is the compiler's own.
    """
    compiler = _compiler()
    sources = sorted((*recipe.source.parent.iterdir(), *_SHARED.iterdir()))
    texts = (path.read_text() for path in sources)
    made_of = [recipe.source.name, recipe.constants, _FLAGS, _TUNED, _machine(), _version(compiler), *texts]
    name = hashlib.sha256("\n".join(map(str, made_of)).encode()).hexdigest()[:24]
    file = _folder() / f"{recipe.source.stem}-{name}.so"
    if not file.exists():
        with written_aside(file) as partial:
            _compile(compiler, recipe, partial)
    return ctypes.CDLL(str(file))


def share_out(work: Work, count: int, least: int, multiple: int = 1) -> None:
    """Do something `count` times in as many threads as torch uses.

    Args:
        work: Called once where OpenMP shares it out or one thread is enough, else once in each thread.
        count: How many times.
        least: What one thread does at least: less is not worth waking another for.
        multiple: Threads start at multiples of this.
    """
    threads = threads_for(count, least)
    entry = openmp() if threads > 1 else 0
    if threads == 1 or entry:
        work(0, count, entry, threads)
        return
    size = -(-count // threads // multiple) * multiple
    starts = range(0, count, size)
    ends = (min(start + size, count) for start in starts)
    list(_workers(threads).map(lambda start, end: work(start, end, 0, 1), starts, ends))


def threads_for(count: int, least: int, most: int | None = None) -> int:
    """How many threads share out `count` things, if each takes `least` or more; `most` as torch uses if left out."""
    return max(1, min(most or torch.get_num_threads(), count // least))


def in_every_thread(act: Callable[[], object]) -> None:
    """Call something in this thread and, where torch runs on OpenMP, in each of its threads."""
    threads = torch.get_num_threads()
    if threads > 1 and openmp():
        _PARALLEL(openmp())(_REGION(lambda _: act()), None, threads, 0)
    else:
        act()


@cache
def openmp() -> int:
    """The address by which torch's own OpenMP runs something in parallel; 0 if torch does not use it.

    Its threads wait for work busily for a while: others beside them would have to share the processors with them.
    """
    try:
        runtime = ctypes.CDLL(torch._C.__file__)  # with everything it was linked to
        return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="roi-loops")


def _compile(compiler: str, recipe: Recipe, out: Path) -> None:
    constants = [f"-D{name}={value}" for name, value in recipe.constants]
    fixed = [*_FLAGS, "-I", str(_SHARED), *constants, str(recipe.source), "-o", str(out)]
    for tuned in _TUNED:
        command = [compiler, *tuned, *fixed]
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
