"""The GPU's products with packed matrices without a GPU: interpreted, and compiled, for the code they become."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("packed_cases.py")
GPUS = {"A100": 80, "H200": 90}


def test_kernels_multiply_as_in_double_precision():
    pytest.importorskip("triton", reason="Triton is not installed")
    # Triton decides when it is imported whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert {name.split()[0] for name in errors} == {"unpacked", "few_rows", "tiles"}
    for name, error in errors.items():
        if name.startswith("unpacked"):
            assert error == 0, name
        assert error < (1e-6 if "float32" in name else 2**-11), name


PROGRAM = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from roi_lightning.runtime import triton_decode
from roi_lightning.runtime.triton_products import CONFIGS

name, capability, rows = sys.argv[1], *map(int, sys.argv[2:])
kernel = getattr(triton_decode, name)
kinds = dict.fromkeys(("x", "values", "bias", "y"), "*bf16") | {"words": "*i16", "places": "*u8"}
kinds |= dict.fromkeys(("rows", "outputs", "kept"), "i32")
for sizes, warps, stages in CONFIGS[name]:
    fixed = {"BIASED": True, "ROWS": rows, **sizes}
    types = {x: "constexpr" if x in fixed else kinds[x] for x in kernel.arg_names}
    constants = {x: value for x, value in fixed.items() if x in types}
    options = {"num_warps": warps, "num_stages": stages}
    made = compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    print(sizes, warps, stages, made.metadata.shared)
    assert made.metadata.shared < 160 << 10, sizes  # the smaller of both GPUs' memory for it
"""


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("kernel", "rows"), [("few_rows", 1), ("few_rows", 8), ("tiles", 16), ("tiles", 64), ("unpacked", 1)]
)
def test_kernels_compile_for_gpus(kernel, rows, gpu, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    arguments = [sys.executable, "-c", PROGRAM, kernel, str(GPUS[gpu]), str(rows)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
