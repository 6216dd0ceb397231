"""`doctor`: versions, compiler, kernels, GPU, half precision and memory: what decides how fast a run is."""

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Final, NamedTuple

from rich.text import Text

from roi_lightning.cli.arguments import DoctorOptions
from roi_lightning.errors import reason
from roi_lightning.utils.atomic_io import check_writable, write_json
from roi_lightning.utils.tables import print_table

_MARKS: Final = {True: Text("✓", "green"), False: Text("!", "yellow")}


class Finding(NamedTuple):
    """What a probe found: whether it is as it should be, what there is, and what that means."""

    ok: bool
    found: str
    means: str


def main(options: DoctorOptions) -> None:
    """Print a row per check.

    Raises:
        UserError: If the JSON can't be written.
    """
    if options.json:
        check_writable(options.json)
    findings = {name: _attempt(probe) for name, probe in PROBES.items()}
    if options.json:
        write_json(options.json, {name: finding._asdict() for name, finding in findings.items()})
    rows: list[list[str | Text]] = [
        [name, _MARKS[ok], found, means] for name, (ok, found, means) in findings.items()
    ]
    print_table(["check", "", "found", "means"], rows, left=4)


def _attempt(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:  # whatever a machine may be missing
        return Finding(False, f"{type(error).__name__}: {reason(error)}", "slower, or not at all")


def _versions() -> Finding:
    names = ("roi-lightning", "torch", "lightning", "transformers", "datasets")
    found = ", ".join([*(f"{name} {version(name)}" for name in names), f"Python {platform.python_version()}"])
    return Finding(True, found, "all others: python -m torch.utils.collect_env, transformers env")


def _compiler() -> Finding:
    from roi_lightning.utils.cpp_extension import compiler_in_use

    return Finding(True, compiler_in_use()[1], "compiles the C++ kernels, once")


def _kernels() -> Finding:
    import torch

    from roi_lightning.masks.pattern import NMPattern
    from roi_lightning.models.config import compute_dtype
    from roi_lightning.samplers.cpu_kernels import build
    from roi_lightning.utils.cpp_extension import load, openmp

    dtype = compute_dtype(torch.bfloat16, torch.device("cpu"))
    load(build("gumbel_top_k", NMPattern("2:4"), dtype))
    means = "draw masks on the CPU" if openmp() else "run in one thread: this torch lacks GNU's OpenMP"
    return Finding(bool(openmp()), "compile and load", means)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding(False, "none that torch can use", "everything runs on the CPU")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info()
    found = f"{', '.join(card.name for card in cards)}; {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    if min(card.major for card in cards) < 8:
        return Finding(False, found, "no bf16, no 2:4 tensor cores: these come with compute capability 8.0")
    return Finding(True, found, f"CUDA {torch.version.cuda}")


def _half_precision() -> Finding:
    import torch

    from roi_lightning.models.config import compute_dtype, native_instructions

    listed = native_instructions(torch.bfloat16)
    found = f"bf16: {'not known' if listed is None else ', '.join(listed) or 'none'}"
    if compute_dtype(torch.bfloat16, torch.device("cpu")) is torch.bfloat16:
        return Finding(True, found, "the CPU holds bf16 weights as they are stored")
    means = "the CPU holds bf16 weights in fp32, in twice the memory; `dtype: bfloat16` saves it, slowly"
    return Finding(False, found, means)


def _memory() -> Finding:
    import torch

    from roi_lightning.utils.devices import memory_of

    return Finding(True, f"{memory_of(torch.device('cpu')) / 2**30:.0f} GiB", "`plan` says what a run needs")


def _load() -> Finding:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    means = "beside other work threads wait for each other: wait, or set OMP_NUM_THREADS="
    return Finding(load < cores / 2, f"{load:.1f} on {cores} cores", f"{means}{max(1, cores - round(load))}")


PROBES: Final[dict[str, Callable[[], Finding]]] = {
    "versions": _versions,
    "compiler": _compiler,
    "kernels": _kernels,
    "gpu": _gpu,
    "half_precision": _half_precision,
    "memory": _memory,
    "load": _load,
}
