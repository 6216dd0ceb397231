"""The GPU's kernels without a GPU: interpreted, against the eager form; and compiled, for the code they become."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_cases.py")
GPUS = {"A100": 80, "H100 and H200": 90}


@pytest.fixture(scope="module")
def errors():
    pytest.importorskip("triton", reason="Triton is not installed")
    # Triton decides when it is imported whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_as_exact_as_the_eager_form(errors):
    cases = {name: error for name, error in errors.items() if name not in ("fp16", "nan")}
    assert len(cases) >= 16
    for name, (eager, ours) in cases.items():
        for mine, its in zip(ours, eager, strict=True):
            # Cold temperatures magnify the rounding of fp32, and one unlucky group outweighs all others.
            assert mine < 1e-6 + 10 * its, name
        if name.startswith("StraightThrough"):
            assert ours[0] < 1e-7, name


def test_kernels_round_once_to_the_weights_type(errors):
    differ, apart, of_logits = errors["fp16"]  # Triton's interpreter does not round to bf16 as a GPU does
    assert differ < 0.01
    assert apart <= 2**-10, "the next number of fp16 or the same"
    assert of_logits < 1e-4


def test_logits_that_are_no_numbers_show(errors):
    assert errors["nan"] == [1, 0]


PROGRAM = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from roi_lightning.samplers import triton_top_k

m, n, capability = map(int, sys.argv[1:])
kinds = {"logits": "*fp32", "weight": "*bf16", "grad": "*bf16", "pull": "*fp32"}
kinds |= dict.fromkeys(("over_lam", "over_tau", "push"), "fp32")
kinds |= dict.fromkeys(("groups", "columns", "key0", "key1"), "i32")
fixed = {"M": m, "N": n, "WIDTH": m, "TILE": 1024 // m, "HARD": False, "KEPT_NORM": True}
for name, out in (("masked_weight", "*bf16"), ("logits_gradient", "*fp32")):
    kernel = getattr(triton_top_k, name)
    types = {x: "constexpr" if x in fixed else {**kinds, "out": out}[x] for x in kernel.arg_names}
    constants = {x: value for x, value in fixed.items() if x in types}
    made = compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
"""


@pytest.mark.parametrize(
    ("spec", "gpu"),
    [
        ((4, 2), "A100"),
        pytest.param((8, 4), "A100", marks=pytest.mark.slow),
        pytest.param((4, 2), "H100 and H200", marks=pytest.mark.slow),
        pytest.param((8, 4), "H100 and H200", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_gpus(spec, gpu, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    arguments = [sys.executable, "-c", PROGRAM, *map(str, (*spec, GPUS[gpu]))]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
