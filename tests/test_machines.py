"""The tests that compute, once more as on other machines: with fewer instructions, and other answers about them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# What runs commands, reads text or draws pictures does not compute on its own.
OTHERS = {
    "machines",
    "study",
    "slurm",
    "bad_*",
    "imports",
    "fuzz",
    "compare",
    "publish",
    "hub",
    "configs",
    "room",
}
OTHERS |= {"corpora", "datamodule", "streaming", "harness", "triton", "packed_triton", "compiled", "cli"}
OLD = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
MACHINES = {
    "half-width products are slow": ({}, "no"),
    "half-width products are quick": ({}, "yes"),
    "AVX2": (AVX2, "no"),
    "plain x86-64": (OLD, "no"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "half_width"), MACHINES.values(), ids=MACHINES)
def test_the_suite_passes_there(environment, half_width):
    left_out = [f"--ignore-glob={TESTS}/test_{name}.py" for name in sorted(OTHERS)]
    options = ["-q", "-n", "0", "--session-timeout", "3600", "--half_width", half_width]
    command = [sys.executable, "-m", "pytest", *options, *left_out, str(TESTS)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-8000:]
