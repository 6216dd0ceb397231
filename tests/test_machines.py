"""The tests that compute, once more as on other machines: with fewer instructions, and other answers about them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Samplers and packed layers; runs that are held to the bits of others.
FILES = """
packed_kernels accelerate packed_checkpoint compute_dtype speed_linear samplers cpu_kernels categorical
noise proximal sparsegpt pipeline priors roi objectives losses nonfinite export evaluation loading architectures
resume interruption maskllm proxsparse joint recover api examples plan
"""
OLD = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
# Environment, and what is believed of instructions for bf16 and fp16.
MACHINES = {
    "with them": ({}, "yes"),
    "without": ({}, "no"),
    "AVX2": (AVX2, "no"),
    "plain x86-64": (OLD, "no"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "half_width"), MACHINES.values(), ids=MACHINES)
def test_what_computes_passes_there(environment, half_width, tmp_path):
    # torch's compiler would take what it has made for other instructions, and write past the end of tensors.
    environment = os.environ | environment | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    files = [str(next(TESTS.rglob(f"test_{name}.py"))) for name in FILES.split()]
    options = ["-q", "-n", "0", "--half_width", half_width]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout[-4000:])
    assert done.returncode == 0
