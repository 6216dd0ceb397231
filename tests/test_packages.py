"""What is built of this repository: its metadata hold, the wheel runs, and the source distribution tests itself."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import roi_lightning
from helpers.tiny_models import tiny_qwen2
from roi_lightning.errors import Extra, UserError, require

pytest.importorskip("hatchling")
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(roi_lightning.__file__).parent
FOLDERS = ("src", "configs", "tests", "scripts", "examples", "benchmarks", "docs", ".github", ".devcontainer")
FILES = (
    *("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Dockerfile", "mkdocs.yml"),
    *("constraints.txt", "pyproject.toml", ".gitignore", ".dockerignore", ".pre-commit-config.yaml"),
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def files(folder: Path) -> set[str]:
    """The files below a folder, except what Python leaves there."""
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


def environment(folder, package):
    """The folder of the commands of a new environment: it holds one package alone, others are this one's."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    install(folder / "bin", package)
    return folder / "bin"


def install(commands, *what):
    """Have pip install something and nothing else, without an index, whatever others have."""
    options = ["--no-deps", "--no-index", "--no-compile", "--no-build-isolation", "--ignore-installed"]
    output(commands, sys.executable, "-m", "pip", "--python", commands / "python", "install", *options, *what)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("installed"), wheel)


def output(folder, *command, **environment) -> str:
    """What a command prints in a folder, with no path to the source tree."""
    plain = {"PATH": os.environ["PATH"], "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words, options = [str(word) for word in command], {"capture_output": True, "text": True}
    done = subprocess.run(words, cwd=folder, env=plain | environment, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def requirements(lines):
    return {canonicalize_name(found.name): found for found in map(Requirement, lines)}


def test_every_dependency_is_pinned_within_its_bounds():
    wanted = requirements(PROJECT["dependencies"] + [line for lines in EXTRAS.values() for line in lines])
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = requirements(line for line in pins if not line.startswith("#"))
    # A torch that was built for GPUs brings its own Triton.
    assert wanted.keys() - pinned.keys() == {"roi-lightning", "triton"}
    for name in wanted.keys() & pinned.keys():
        (pin,) = pinned[name].specifier
        assert pin.version in wanted[name].specifier, name


def test_extras_that_errors_and_pages_name_exist():
    of_errors = set(get_args(Extra))
    assert EXTRAS.keys() == of_errors | {"all", "dev", "docs"}
    assert requirements(EXTRAS["all"])["roi-lightning"].extras == of_errors
    pages = [
        *PACKAGE.rglob("*.py"),
        *ROOT.glob("configs/**/*.yaml"),
        *ROOT.glob("docs/*.md"),
        ROOT / "README.md",
    ]
    named = {
        name for page in pages for name in re.findall(r"(?:roi-lightning|'\.)\[(\w+)\]", page.read_text())
    }
    assert named <= EXTRAS.keys()


@pytest.mark.parametrize("extra", get_args(Extra))
def test_a_missing_package_is_one_that_the_extra_brings(extra, monkeypatch):
    brought = requirements(EXTRAS[extra])
    for name in brought:
        monkeypatch.setitem(sys.modules, name.replace("-", "_"), None)
    with pytest.raises(UserError) as caught:
        require(extra, "this")
    named = re.fullmatch(
        rf"this needs (.+); run `pip install 'roi-lightning\[{extra}\]'`", str(caught.value)
    )[1]
    wanted = {*brought}
    assert set(map(canonicalize_name, named.split(" and "))) == wanted


def test_the_wheel_holds_the_package_and_the_configurations(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    shipped = {f"{name}/{file}" for name in ("configs", "examples/project") for file in files(ROOT / name)}
    assert inside == {f"roi_lightning/{name}" for name in files(PACKAGE) | shipped}
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


def test_the_sdist_is_complete(sdist):
    inside = files(sdist)
    assert inside >= {f"{folder}/{name}" for folder in FOLDERS for name in files(ROOT / folder)} | {*FILES}


def test_the_image_is_made_of_what_is_here():
    image, ignored = ((ROOT / name).read_text() for name in ("Dockerfile", ".dockerignore"))
    scripts = {*re.findall(r"scripts/\w+", image)}
    assert [(ROOT / script).is_file() for script in scripts] == [True] * 3
    assert all(f"${{{name}}}" in image for name in re.findall(r"^ARG (\w+)", image, re.MULTILINE))
    assert {".venv", ".git", "runs"} <= {*ignored.split()}
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).samefile(ROOT / "Dockerfile")
    assert container["postCreateCommand"] in image


@pytest.mark.slow
def test_a_new_project_tests_itself_and_fits_by_both_commands(installed, tmp_path):
    command, python, project = installed / "roi-lightning", installed / "python", tmp_path / "even-masks"
    output(tmp_path, command, "new", project)
    install(installed, "--editable", project)
    assert "3 passed" in output(project, python, "-m", "pytest", "-p", "no:randomly")
    fit = ["fit", "--config", project / "configs/even_masks.yaml", "--model", "EvenModule", "--overwrite"]
    fit += ["--lm", tiny_qwen2(tmp_path / "model"), "--model.prior_windows", "2", "--steps", "2"]
    fit += ["--corpora", "email", "--data.held_out_fraction", "0.2", "--seq_len", "32"]
    masks = set()
    for program in ([command], [python, "-m", "even_masks"]):
        output(tmp_path, *program, *fit)
        masks.add((tmp_path / "runs/even_masks/mask.safetensors").read_bytes())
    assert len(masks) == 1


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to copy")
def test_a_renamed_copy_tests_itself(tmp_path):
    output(tmp_path, "git", "clone", "--quiet", ROOT, copy := tmp_path / "copy")
    output(copy, "scripts/rename", "other-masks")
    python = environment(tmp_path / "environment", copy) / "python"
    output(copy, python, "tests/golden/make.py")
    output(copy, python, "-m", "docs.write_help")
    for name in output(copy, "git", "ls-files").split():
        assert not re.search(b"roi[_-]lightning", name.encode() + (copy / name).read_bytes()), name
    gone = "try: import roi_lightning.errors\nexcept ImportError: print('gone')"
    assert output(copy, python, "-c", gone) == "gone\n"
    core = "samplers masks learning/test_roi.py cli/test_cli.py examples test_golden.py test_packages.py"
    assert " passed" in output(copy, python, "-m", "pytest", *(f"tests/{name}" for name in core.split()))
