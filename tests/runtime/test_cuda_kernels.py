"""Which kernel multiplies how many rows on a GPU, seen without one: kernels are stood in for."""

import logging

import pytest
import torch

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.runtime import cuda_kernels, pack, unpack
from roi_lightning.runtime.packed_format import quantize
from roi_lightning.runtime.semi_structured import SemiStructured


def packed_matrix(inputs, int8=False):
    weight = torch.randn(8, inputs)
    packed = pack(weight.masked_fill(~NMPattern("2:4").top(weight.abs()), 0))
    return quantize(packed) if int8 else packed


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(cuda_kernels.kernels, "disabled", False)
    monkeypatch.setattr(cuda_kernels, "_warm", set())


@pytest.fixture
def seen(monkeypatch):
    """The kernels that were called, with their numbers of rows; all of them compute what `plain` does."""
    calls, plain = [], cuda_kernels.KERNELS["plain"]

    def stand_in(name):
        return lambda x, packed, bias: calls.append((name, len(x))) or plain(x, packed, bias)

    for name in cuda_kernels.KERNELS:
        monkeypatch.setitem(cuda_kernels.KERNELS, name, stand_in(name))
    return calls


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (32, {0: "plain", 1: "few_rows", 4: "few_rows", 5: "unpacked", 4096: "unpacked"}),
        (36, {0: "plain", 1: "unpacked", 5: "unpacked"}),  # indices in no whole words
    ],
)
def test_the_number_of_rows_chooses_the_kernel(inputs, expected):
    packed = packed_matrix(inputs)
    assert {rows: cuda_kernels.kernel_for(packed, rows) for rows in expected} == expected


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 10, 32), (70, 32), (0, 32)])
def test_every_kernel_is_compiled_ahead_once(seen, shape, int8):
    packed, x, bias = packed_matrix(32, int8), torch.randn(shape), torch.randn(8)
    cuda_kernels.warm_up(packed, torch.float32)
    assert seen == [("few_rows", 1), ("few_rows", 2), ("few_rows", 4), ("unpacked", 5)]
    seen.clear()
    y = cuda_kernels.multiply(x, packed, bias)
    torch.testing.assert_close(y, x @ unpack(packed).T + bias)
    assert len(seen) == 1


def test_int8_kernels_are_compiled_for_every_dtype_of_activations(seen):
    packed = packed_matrix(32, int8=True)
    for dtype in (torch.float32, torch.bfloat16):
        assert cuda_kernels.multiply(torch.randn(3, 32).to(dtype), packed, None).dtype == dtype
        assert len(seen) == 5
        seen.clear()


def test_kernels_that_fail_are_not_tried_again(seen, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no Triton")

    monkeypatch.setitem(cuda_kernels.KERNELS, "unpacked", fail)
    packed, x = packed_matrix(32), torch.randn(20, 32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(cuda_kernels.multiply(x, packed, None), x @ unpack(packed).T)
    assert [record.message for record in caplog.records] == [
        "packed layers are unpacked for every product: Triton's kernels can't be used here (no Triton)"
    ]
    assert seen[-2:] == [("plain", 20)] * 2


def test_large_batches_without_a_gradient_take_the_second_packing():
    large = SemiStructured(torch.randn(8, 32))
    taken = {rows: large.takes(torch.randn(rows, 32)) for rows in (1, 64, 65, 1000)}
    assert taken == {1: False, 64: False, 65: True, 1000: True}
    assert large.takes(torch.randn(5, 13, 32))
    x = torch.randn(100, 32, requires_grad=True)
    assert not large.takes(x)
    with torch.no_grad():
        assert large.takes(x)
