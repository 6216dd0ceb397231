"""What conftest.py promises of every test, seen in a suite of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import LONG

TESTS = Path(__file__).parent
SUITE = """
import logging, os, random, pytest, torch

@pytest.mark.parametrize("time", [1, 2])
def test_nothing_leaks(time):
    smallest = torch.tensor(1e-40)
    assert float(smallest * 0.5) > 0
    assert (random.random(), float(torch.rand(()))) == (0.8444218515250481, 0.49625658988952637)
    assert logging.getLogger("torchao").level < logging.ERROR
    assert "PL_GLOBAL_SEED" not in os.environ
    torch.set_flush_denormal(True)
    random.seed(time)
    logging.getLogger("torchao").setLevel(logging.ERROR)
    os.environ["PL_GLOBAL_SEED"] = "3"

def test_a_package_is_missing():
    pytest.importorskip("no_such_package")

@pytest.mark.gpu
def test_a_gpu_is_missing():
    pytest.skip("no GPU")

def test_real_text(roi_data):
    pass
"""
CONFIGURATION = """
[pytest]
addopts = -m "not slow" --randomly-dont-reset-seed
markers =
    slow
    gpu
"""


def run_suite(folder, *options, **environment):
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text(CONFIGURATION)
    (folder / "tests" / "test_it.py").write_text(SUITE)
    shutil.copy(TESTS / "conftest.py", folder / "tests")
    names = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env=names | environment, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_what_is_long_is_there():
    assert {name for name in LONG if not list(TESTS.rglob(f"{name}.py"))} == set()


@pytest.mark.slow
def test_in_ci_only_what_is_meant_is_skipped(tmp_path):
    status, said = run_suite(tmp_path, CI="true")
    assert status == 1
    assert "skipped in CI: Skipped: could not import 'no_such_package'" in said
    assert "1 failed, 2 passed, 2 skipped" in said
