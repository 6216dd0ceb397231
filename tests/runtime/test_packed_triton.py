"""The GPU's products with packed matrices, compiled without a GPU for the code they become."""

import os
import subprocess
import sys

import pytest

GPUS = {"A100": 80, "H200": 90}


PROGRAM = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from roi_lightning.runtime import triton_kernels
from roi_lightning.runtime.triton_launch import CONFIGS

name, capability, rows, int8 = sys.argv[1], *map(int, sys.argv[2:])
kernel = getattr(triton_kernels, name)
kinds = dict.fromkeys(("x", "bias", "y"), "*bf16") | {"words": "*i16", "indices": "*u8", "scales": "*fp32"}
kinds["values"] = "*i8" if int8 else "*bf16"
kinds |= dict.fromkeys(("rows", "outputs", "kept"), "i32")
for sizes, warps, stages in CONFIGS[name]:
    fixed = {"SCALED": bool(int8), "BIASED": True, "ROWS": rows, **sizes}
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
    ("kernel", "rows", "int8"),
    [("few_rows", 1, 0), ("few_rows", 4, 0), ("unpacked", 1, 0), ("few_rows", 4, 1), ("unpacked", 1, 1)],
)
def test_kernels_compile_for_gpus(kernel, rows, int8, gpu, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    arguments = [sys.executable, "-c", PROGRAM, kernel, str(GPUS[gpu]), str(rows), str(int8)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
