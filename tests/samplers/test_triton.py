"""The GPU's kernels without a GPU: interpreted, against the eager form; and compiled, for the code they become."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = "from helpers import triton_cases; triton_cases.main({every})"
GPUS = {"A100": 80, "H100 and H200": 90}


def interpreted(every):
    """Errors of the kernels, from one process: it starts slowly."""
    pytest.importorskip("triton", reason="Triton is not installed")
    # Triton decides when it is imported whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONWARNINGS"] += ",ignore::RuntimeWarning"  # NumPy's of integers that wrap, and of NaN
    command = [sys.executable, "-c", CASES.format(every=every)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return interpreted(every=False)


def test_kernels_are_as_exact_as_the_eager_form(found):
    assert_as_exact(found["errors"], 20)


@pytest.mark.slow
def test_kernels_are_as_exact_as_the_eager_form_in_every_setting():
    assert_as_exact(interpreted(every=True)["errors"], 40)


def assert_as_exact(cases, count):
    assert len(cases) == count
    for name, (eager, ours) in cases.items():
        for mine, its in zip(ours, eager, strict=True):
            # Cold temperatures magnify the rounding of fp32, and one unlucky group outweighs all others.
            assert mine < 1e-6 + 10 * its, name
        if name.startswith("StraightThrough"):
            assert ours[0] < 1e-7, name


def test_kernels_round_once_to_the_weights_type(found):
    differ, apart, of_logits = found["fp16"]  # Triton's interpreter does not round to bf16 as a GPU does
    assert differ < 0.01
    assert apart <= 2**-10, "the next number of fp16 or the same"
    assert of_logits < 1e-4


def test_logits_at_the_rim_are_the_eager_form_s(found):
    assert found["rim"] == [True] * 5
    assert not found["disabled"]


def test_a_shard_is_drawn_as_a_part_of_the_whole(found):
    assert found["shards"] == [True] * 5


def test_numbers_are_read_from_the_device(found):
    assert found["numbers"]


PROGRAM = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from roi_lightning import samplers
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import triton_kernels, triton_launch

sampler, spec, capability = sys.argv[1:]
kinds = {"logits": "*fp32", "weight": "*bf16", "grad": "*bf16", "numbers": "*i32"}
kinds |= {"groups": "i32", "first": "i64"}
fixed = triton_launch.constants(getattr(samplers, sampler)().kernel(NMPattern(spec)))
for name, out in (("masked_weight", "*bf16"), ("logits_gradient", "*fp32")):
    kernel = getattr(triton_kernels, name)
    types = {x: "constexpr" if x in fixed else {**kinds, "out": out}[x] for x in kernel.arg_names}
    made = compile(ASTSource(kernel, types, fixed), target=GPUTarget("cuda", int(capability), 32))
    assert made.asm["cubin"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["A100", "H100 and H200"])
@pytest.mark.parametrize("sampler", ["GumbelTopK", "GumbelSubset", "Categorical"])
@pytest.mark.parametrize("m", [4, 8])
def test_kernels_compile_for_gpus(m, sampler, gpu, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    n = 2 if sampler == "Categorical" else m // 2  # its kernel is for few candidates
    arguments = [sys.executable, "-c", PROGRAM, sampler, f"{n}:{m}", str(GPUS[gpu])]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
