"""Products with packed matrices, against double precision and against each other."""

import logging

import pytest
import torch
from torch import nn

from roi_lightning.contrib.packed import kernels, pack, unpack
from roi_lightning.contrib.packed.format import quantize
from roi_lightning.contrib.packed.linear import (
    MAX_SMALL_BATCH,
    packed_linear,
    speed_up_dense,
)
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.utils import cpp_extension

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Dtypes of what is multiplied, by matrices of the same dtype and of int8; each pair is a library of its own.
FORMS = [(dtype, False) for dtype in DTYPES] + [
    pytest.param(dtype, True, id=f"{dtype}-int8", marks=[pytest.mark.slow] * (dtype is torch.float16))
    for dtype in DTYPES
]


@pytest.fixture(autouse=True)
def _switch(monkeypatch):
    monkeypatch.setattr(kernels.kernels, "disabled", False)


def numbers(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_matrix(dtype, outputs, inputs, int8=False):
    weight = numbers(dtype, outputs, inputs, seed=1)
    mask = NMPattern("2:4").top(numbers(torch.float32, outputs, inputs, seed=2))
    packed = pack(weight.masked_fill(~mask, 0))
    return quantize(packed) if int8 else packed


def product(x, packed, bias=None):
    """By the loop, and nothing else."""
    y = kernels.multiply(x, *packed, bias)
    assert y is not None
    return y


def dense_product(x, weight, bias=None):
    y = kernels.multiply_dense(x, weight, bias)
    assert y is not None
    return y


def exact_matrix(packed):
    """The dense matrix in double precision, of a packed one's documented form alone."""
    scales = 1 if packed.scales is None else packed.scales.double()[:, None]
    weight = torch.zeros(packed.shape, dtype=torch.float64)
    return weight.scatter_(1, packed_inputs(packed), packed.values.double() * scales)


def in_stated_order(x, dense, inputs, bias, scales=None):
    """The sums of `matmul.cpp`, one number at a time; exact products, as those of 16-bit numbers are in fp32."""
    out = []
    for row in x.flatten(0, -2).float():
        for o, line in enumerate(dense.float()):
            terms = line[inputs[o]] * row[inputs[o]]
            terms = torch.nn.functional.pad(terms, (0, -len(terms) % 16)).view(-1, 16)
            sums = torch.zeros(16)
            for term in terms:
                sums = sums + term
            while len(sums) > 1:
                half = len(sums) // 2
                sums = sums[:half] + sums[half:]
            total = sums[0] * (1 if scales is None else scales[o])
            out.append(total + (0 if bias is None else bias[o].float()))
    return torch.stack(out).view(*x.shape[:-1], -1).to(x.dtype)


def packed_inputs(packed):
    """Where the kept weights stand, read off one by one."""
    rows = []
    for values, indices in zip(packed.values, packed.indices, strict=True):
        bits = "".join(f"{byte:08b}"[::-1] for byte in indices.tolist())
        rows.append([k // 2 * 4 + int(bits[2 * k : 2 * k + 2][::-1], 2) for k in range(len(values))])
    return torch.tensor(rows)


def assert_exact(y, x, weight, bias, terms):
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Half a unit of the last place, and what sums in fp32 leave: a unit of each of their additions.
    size = x.double().abs() @ weight.double().abs().T + 1
    rounding = 0.5 * torch.finfo(y.dtype).eps * exact.abs() + terms / 16 * 2**-23 * size + 9 * 2**-24 * size
    error = (y.double() - exact).abs()
    assert (error <= rounding).all(), (len(x), float((error / rounding).max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 3), (5, 16), (7, 33), (64, 1000)])
def test_dense_products_are_exact_too(dtype, outputs, inputs):
    weight, bias = numbers(dtype, outputs, inputs, seed=1), numbers(dtype, outputs, seed=3)
    for rows, given in ((1, None), (2, bias), (7, None), (20, bias)):
        x = numbers(dtype, rows, inputs)
        assert_exact(dense_product(x, weight, given), x, weight, given, inputs)
    alone = torch.cat([dense_product(row, weight) for row in x.split(1)])
    assert torch.equal(dense_product(x, weight), alone)


@pytest.mark.parametrize(("dtype", "int8"), FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (5, 12), (7, 32), (3, 132), (33, 576), (64, 1028)])
def test_products_are_those_of_the_dense_matrix(dtype, int8, outputs, inputs):
    packed, bias = packed_matrix(dtype, outputs, inputs, int8), numbers(dtype, outputs, seed=3)
    for rows, given in ((1, None), (2, bias), (8, None), (9, bias), (20, bias)):
        x = numbers(dtype, rows, inputs)
        assert_exact(product(x, packed, given), x, exact_matrix(packed), given, inputs // 2)


@pytest.mark.parametrize(
    ("dtype", "inputs", "int8"),
    [*((x, size, False) for x in DTYPES[1:] for size in (12, 128, 212)), (torch.bfloat16, 212, True)],
)
def test_sums_are_in_the_stated_order(dtype, inputs, int8):
    packed, bias = packed_matrix(dtype, 3, inputs, int8), numbers(dtype, 3, seed=3)
    whole = unpack(packed._replace(scales=None))
    dense, every = numbers(dtype, 3, inputs - 1, seed=4), torch.arange(inputs - 1).expand(3, -1)
    for rows, given in ((1, bias), (5, None)):
        x = numbers(dtype, rows, inputs)
        slow = in_stated_order(x, whole, packed_inputs(packed), given, packed.scales)
        assert torch.equal(product(x, packed, given), slow)
        slow = in_stated_order(x[:, 1:], dense, every, given)
        assert torch.equal(dense_product(x[:, 1:], dense, given), slow)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("openmp", [True, False])
def test_the_number_of_threads_changes_no_bit(openmp, int8, monkeypatch):
    if not openmp:
        for module in (cpp_extension, kernels):
            monkeypatch.setattr(module, "openmp", lambda: 0)
    packed, x = packed_matrix(torch.bfloat16, 1001, 256, int8), numbers(torch.bfloat16, 3, 256)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(product(x, packed))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.fixture
def compile_again():
    """Whatever was compiled is forgotten, now and at the end."""

    def forget():
        cpp_extension.load.cache_clear()
        kernels._library.cache_clear()

    yield forget
    forget()


# Of those that this processor has, too.
FEWER = [(), *([("-mavx2",)] if torch.cpu.get_capabilities().get("avx2") else [])]


@pytest.mark.parametrize("instructions", FEWER, ids=lambda flags: " ".join(flags) or "none")
@pytest.mark.parametrize(
    ("dtype", "int8"),
    [(torch.bfloat16, False), *(pytest.param(x, False, marks=pytest.mark.slow) for x in DTYPES[::2])],
)
def test_older_cpus_compute_alike(dtype, int8, instructions, compile_again, monkeypatch):
    packed, x = packed_matrix(dtype, 19, 212, int8), numbers(dtype, 9, 212)
    bias = numbers(dtype, 19, seed=3)
    here, written = product(x, packed, bias), kernels.unpack(*packed, dtype)
    monkeypatch.setattr(cpp_extension, "_TUNED", (instructions,))
    compile_again()
    there = product(x, packed, bias)
    assert torch.equal(kernels.unpack(*packed, dtype), written)
    if dtype is torch.float32:  # multiplied and added in one rounding here, in two there
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(there, here)


@pytest.mark.parametrize("shape", [(576,), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_any_shape_is_taken(shape):
    packed, x = packed_matrix(torch.bfloat16, 11, shape[-1]), numbers(torch.bfloat16, *shape)
    y = product(x, packed)
    assert y.shape == (*shape[:-1], 11)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, unpack(packed)), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_shows(bad, dtype):
    packed, x = packed_matrix(dtype, 4, 36), torch.ones(2, 36, dtype=dtype)
    x[1, int(packed_inputs(packed)[2, 17])] = bad
    y = product(x, packed)
    assert y[0].isfinite().all()
    assert not y[1, 2].isfinite()


@pytest.mark.parametrize("int8", [False, True])
def test_without_a_compiler_there_is_a_fallback(int8, compile_again, monkeypatch, caplog, tmp_path):
    packed, x = packed_matrix(torch.bfloat16, 11, 64, int8), numbers(torch.bfloat16, 3, 64)
    fast = packed_linear(x, *packed)
    monkeypatch.setenv("ROI_CACHE", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "_compiler", lambda: "false")
    monkeypatch.setattr(cpp_extension, "_version", lambda compiler: "1")
    compile_again()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(packed_linear(x, *packed), fast, rtol=2**-7, atol=1e-2)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "packed layers run many times slower"
    ]


@pytest.mark.parametrize("int8", [False, True])
def test_the_gradient_of_x_is_that_of_the_dense_matrix(int8):
    packed, x = packed_matrix(torch.float32, 11, 64, int8), numbers(torch.float32, 3, 64).requires_grad_()
    bias = numbers(torch.float32, 11, seed=3)
    upstream = numbers(torch.float32, 3, 11, seed=4)
    (gradient,) = torch.autograd.grad(packed_linear(x, *packed, bias), x, upstream)
    torch.testing.assert_close(gradient, upstream @ exact_matrix(packed).float())
    with torch.no_grad():
        assert not packed_linear(x, *packed).requires_grad


def test_the_operator_is_as_torch_expects():
    packed = packed_matrix(torch.float32, 8, 16, int8=True)
    x = torch.linspace(-1, 1, 96).view(2, 3, 16).requires_grad_()
    torch.library.opcheck(torch.ops.roi_lightning.packed_linear, (x, *packed, torch.ones(8)))


def few_rows_linear(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(64, 11, dtype=dtype))
    speed_up_dense(model)
    return model[0]


def test_a_dense_layer_decodes_by_the_kernel_and_does_the_rest_as_before(monkeypatch):
    layer = few_rows_linear()
    weight, bias, calls, loop = *layer.parameters(), [], kernels.multiply_dense
    monkeypatch.setattr(kernels, "multiply_dense", lambda *args: calls.append(len(args[0])) or loop(*args))
    with torch.no_grad():
        for rows in (1, 8, 9, 0):
            x = numbers(torch.float32, rows, 64)
            torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, bias))
    assert calls == [1, 8]
    x = numbers(torch.float32, 2, 64, seed=5).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, -1))
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(11, -1))
    assert calls == [1, 8]


@pytest.mark.parametrize("rows", [1, MAX_SMALL_BATCH + 1])
def test_int8_weights_that_bf16_cannot_hold_are_computed_with(rows):
    """Of 127 and 121 steps bf16 would hold the second as a weight that is a whole step from what it was."""
    weight = torch.tensor([137, 130, 0, 0]).repeat(3, 16).bfloat16() / 128
    bias, x = numbers(torch.bfloat16, 3), torch.tensor([1, -1, 0, 0]).repeat(rows, 16).bfloat16()
    packed = quantize(pack(weight))
    written = (unpack(packed, torch.bfloat16) - weight).abs() / packed.scales[:, None]
    assert 0.9 < written.max() < 1, "where it is written out, as the docs say"
    exact = 16 * 6 * packed.scales + bias
    torch.testing.assert_close(
        packed_linear(x, *packed, bias).float(), exact.expand(rows, -1), rtol=2**-7, atol=0
    )


def test_many_rows_are_multiplied_by_the_dense_matrix():
    packed, bias = packed_matrix(torch.bfloat16, 19, 200), numbers(torch.bfloat16, 19, seed=3)
    x = numbers(torch.bfloat16, MAX_SMALL_BATCH + 1, 200)
    dense = exact_matrix(packed).bfloat16()
    assert torch.equal(packed_linear(x, *packed, bias), nn.functional.linear(x, dense, bias))
    assert torch.equal(packed_linear(x[1:], *packed, bias), product(x[1:], packed, bias))
