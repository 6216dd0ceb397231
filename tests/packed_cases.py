"""Run by test_triton in a process where Triton interprets its kernels: errors, as JSON."""

import json

import torch

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.runtime import pack, triton_launch, unpack
from roi_lightning.runtime.packed_format import quantize

# One of each: what is interpreted is not tuned.
triton_launch.CONFIGS |= {
    "few_rows": (({"LINES": 2, "WORDS": 16}, 4, 1),),
    "unpacked": (({"LINES": 4, "GROUPS": 16}, 4, 1),),
}
SHAPES = [(1, 16), (5, 48), (33, 288)]
ODD = [(3, 4), (5, 132)]


def numbers(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(out, exact):
    return float((out.double() - exact).norm() / exact.norm())


def cases(dtype, shape, int8):
    weight = numbers(dtype, *shape, seed=1)
    weight = weight.masked_fill(~NMPattern("2:4").top(numbers(torch.float32, *shape, seed=2)), 0)
    packed, bias = pack(weight), numbers(dtype, shape[0], seed=3)
    if int8:
        packed = quantize(packed)
        weight = unpack(packed, torch.float64)
    yield "unpacked", error(triton_launch.unpacked(packed, dtype), unpack(packed, dtype).double())
    if not triton_launch.takes_few(packed):
        return
    for count, given in ((1, None), (3, bias), (4, None)):
        x = numbers(dtype, shape[1], count).t()
        exact = x.double() @ weight.double().t() + (0 if given is None else given.double())
        yield f"few_rows of {count}", error(triton_launch.few_rows(x, packed, given), exact)


def main():
    found = {
        f"{name} {list(shape)} {dtype}{' int8' if int8 else ''}": value
        for dtype, shapes, int8 in (
            (torch.float32, SHAPES + ODD, False),
            (torch.float16, SHAPES[2:], False),
            (torch.float32, [(5, 48), (5, 132)], True),
            (torch.float16, [(5, 48)], True),
        )
        for shape in shapes
        for name, value in cases(dtype, shape, int8)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
