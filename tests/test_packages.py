"""What is built of this repository: the wheel runs, and the source distribution tests itself."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import roi_lightning
from cli_helpers import make_lab

pytest.importorskip("hatchling")
lab = pytest.fixture(make_lab)
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(roi_lightning.__file__).parent
FOLDERS = ("src", "configs", "tests", "scripts", "examples", "benchmarks", "docs")
FILES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *("constraints.txt", "mkdocs.yml", "pyproject.toml", ".gitignore"),
)


def files(folder: Path) -> set[str]:
    """The files below a folder, but for what Python leaves there."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix()
        for path in found
        if not {"__pycache__", ".ruff_cache"} & {*path.parts}
    }


def build(target: str, folder: Path) -> Path:
    """A wheel or an sdist, of a copy, so that nothing is written here."""
    copy = folder / "copy"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder / "dist")]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the commands of a new environment: it holds this package alone, others are this one's."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    commands = folder / "bin"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", commands / "python", *install], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return commands


def output(folder, *command, **environment) -> str:
    """What a command prints in a folder, with no path to the source tree."""
    plain = {"PATH": os.environ["PATH"], "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words, options = [str(word) for word in command], {"capture_output": True, "text": True}
    done = subprocess.run(words, cwd=folder, env=plain | environment, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_the_configurations(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    configs = {f"roi_lightning/configs/{name}" for name in files(ROOT / "configs")}
    assert inside == {f"roi_lightning/{name}" for name in files(PACKAGE)} | configs
    assert {Path(name).suffix for name in inside} >= {".cpp", ".hpp", ".yaml"}


def test_the_installed_command_starts(installed, tmp_path):
    assert "usage: roi-lightning verify" in output(tmp_path, installed / "roi-lightning", "verify", "--help")
    program = (
        "import importlib.metadata, roi_lightning; from roi_lightning.cli.config_files import find_config;"
        "print(roi_lightning.__file__, find_config('quickstart'), sep='\\n');"
        "print(importlib.metadata.version('roi-lightning'))"
    )
    package, config, version = output(tmp_path, installed / "python", "-c", program).splitlines()
    folder = Path(package).parent
    assert folder.is_relative_to(installed.parent)
    assert Path(config) == folder / "configs" / "quickstart.yaml"
    assert version == "0.1.0"


@pytest.mark.slow
def test_the_installed_package_plans_and_compiles(installed, lab, tmp_path):
    shown = output(
        tmp_path, installed / "roi-lightning", "plan", *lab.quick(), ROI_CACHE=str(tmp_path / "cache")
    )
    assert "prunable weights" in shown
    program = (
        "from roi_lightning.utils.cpp_extension import Build, load;"
        "from roi_lightning.runtime import cpu_kernels as matmul; from roi_lightning.samplers import cpu_kernels;"
        "load(Build(matmul._SOURCE, (('WEIGHT', 1),)));"
        "load(Build(cpu_kernels.SOURCES / 'gumbel_top_k.cpp', (('M', 4), ('N', 2), ('C', 6), ('WEIGHT', 0))))"
    )
    output(tmp_path, installed / "python", "-c", program, ROI_CACHE=str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


def test_the_sdist_is_complete(sdist):
    inside = files(sdist)
    assert inside >= {f"{folder}/{name}" for folder in FOLDERS for name in files(ROOT / folder)} | {*FILES}


@pytest.mark.slow
def test_the_sdist_collects_its_tests(sdist):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "tests"]
    output(sdist, *command, PYTHONPATH=str(sdist / "src"))
