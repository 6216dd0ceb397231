"""Small C++ kernels for the CPU: compiled once per machine with its own compiler, run in torch's own threads.

The sources are plain C++ without any header of torch's, so that one compiles in a second or a few; headers that they
share are in `cpp`. Whoever uses one has a slower fallback for machines without a compiler, see `FastPath`.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from roi_lightning.errors import reason
from roi_lightning.utils.atomic_io import written_aside

_SHARED: Final = Path(__file__).with_name("cpp")
_COMPILERS: Final = ("c++", "g++", "clang++")
# Scheduled before registers are given out, the members of a group do not wait for each other: a fifth faster.
_SPEED: Final = ("-O3", "-fschedule-insns", "-fno-math-errno", "-fno-trapping-math")
_FLAGS: Final = ("-std=gnu++17", *_SPEED, "-fPIC", "-shared")
# Whichever a compiler takes first; the last one is slow and works everywhere.
_TUNED: Final = (("-march=native", "-ffp-contract=fast"), ("-mcpu=native", "-ffp-contract=fast"), ())
_PATIENCE: Final = 300  # seconds for the compiler

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Build:
    """What to compile.

    Attributes:
        source: The file; its headers are in the same folder or shared.
        constants: Preprocessor constants.
    """

    source: Path
    constants: tuple[tuple[str, int], ...]


@cache
def load(build: Build) -> ctypes.CDLL:
    """The compiled library.

    Raises:
        OSError: If there is no compiler, or what it made can't be loaded.
        RuntimeError: If it can't compile the source; the message is its own.
        UserError: If the library can't be written.
    """
    compiler = _compiler()
    sources = sorted((*build.source.parent.iterdir(), *_SHARED.iterdir()))
    texts = (path.read_text() for path in sources)
    made_of = [build.source.name, build.constants, _FLAGS, _TUNED, _machine(), _version(compiler), *texts]
    name = hashlib.sha256("\n".join(map(str, made_of)).encode()).hexdigest()[:24]
    file = (cache_folder() or _own_folder()) / f"{build.source.stem}-{name}.so"
    if not file.exists():
        with written_aside(file) as partial:
            _compile(compiler, build, partial)
    return ctypes.CDLL(str(file))


def threads_for(count: int, least: int, available: int | None = None) -> int:
    """How many threads, of those available or else of torch's, get at least `least` of `count` iterations."""
    return max(1, min(available or torch.get_num_threads(), count // least))


def openmp() -> int:
    """The address of `GOMP_parallel` in torch's own OpenMP; 0 if torch does not use it.

    Its threads spin for a while after their work: a second pool would compete with them for the cores.
    """
    return openmp_team()[0]


@cache
def openmp_team() -> tuple[int, int, int]:
    """The addresses of `GOMP_parallel`, `omp_get_thread_num` and `omp_get_num_threads`; all 0 if one is missing."""
    try:
        runtime = ctypes.CDLL(torch._C.__file__)  # with everything it was linked to
        entries = (runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads)
        parallel, number, count = (ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in entries)
    except (AttributeError, OSError):
        return 0, 0, 0
    return parallel, number, count


def compiler_in_use() -> tuple[str, str]:
    """The compiler that `load` calls: its path, and the first line of what it says of its version.

    Raises:
        OSError: If there is none, or it can't be run.
    """
    found = _compiler()
    return found, next(iter(_version(found).splitlines()), "")


def _compile(compiler: str, build: Build, out: Path) -> None:
    constants = [f"-D{name}={value}" for name, value in build.constants]
    fixed = [*_FLAGS, "-I", str(_SHARED), *constants, str(build.source), "-o", str(out)]
    for tuned in _TUNED:
        command = [compiler, *tuned, *fixed]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        if done.returncode == 0:
            return
    line = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
    raise RuntimeError(f"{compiler}: {line}")


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
    """What a library compiled for this CPU depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def cache_folder() -> Path | None:
    """Where compiled libraries are kept: ROI_CACHE or the user's cache; None if it can't be written."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("ROI_CACHE") or Path(base) / "roi_lightning")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # the latter where nobody has a home
        pass
    return None


@cache
def _own_folder() -> Path:
    """Goes with the process."""
    folder = tempfile.mkdtemp(prefix="roi_lightning-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class FastPath:
    """An optional fast path, disabled after its first failure: from then on its caller takes the fallback.

    Args:
        message: What to log the first time it fails; the reason follows in brackets.
        level: At which level.

    Attributes:
        disabled: Whether it has failed.
    """

    def __init__(self, message: str, level: int) -> None:
        self.message, self.level = message, level
        self.disabled = False

    def attempt(self, act: Callable[[], object]) -> bool:
        """Run it, unless it has failed before; whether it succeeded."""
        if self.disabled:
            return False
        try:
            act()
        except Exception as error:  # whatever a compiler may fail with
            self.disabled = True
            _log.log(self.level, "%s (%s)", self.message, reason(error))
            return False
        return True
