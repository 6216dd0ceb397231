"""Products in fp32 of numbers that a processor has no instructions for, against double precision."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roi_lightning import products
from roi_lightning.bench.timing import most_allocated
from roi_lightning.language_model import random_language_model
from roi_lightning.products import linear, widen_products
from roi_lightning.sources import resolve_model
from tiny_models import tiny_qwen2

HALF_WIDTH = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[True, False], ids=["slow", "quick"])
def slow(request, monkeypatch):
    monkeypatch.setattr(products, "is_slow", lambda dtype: request.param and dtype.itemsize == 2)
    return request.param


@pytest.fixture
def capable(monkeypatch):
    products.is_slow.cache_clear()
    yield lambda able: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    products.is_slow.cache_clear()


@pytest.mark.parametrize(
    ("able", "slow"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": True, "amx_bf16": False}, False),
        ({"architecture": "arm64", "neon": True, "bf16": False}, True),
        ({"architecture": "arm64", "neon": True, "bf16": True}, False),
        ({"architecture": "unheard of"}, False),
    ],
)
def test_processors_without_instructions_are_known(capable, able, slow):
    capable(able)
    assert products.is_slow(torch.bfloat16) == slow
    assert not products.is_slow(torch.float32)


def numbers(dtype, *shape):
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", HALF_WIDTH)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("lead", [(), (7,), (24,), (2, 15)])
def test_products_and_gradients_are_rounded_once(slow, dtype, with_bias, lead):
    torch.manual_seed(0)
    x, weight, bias = numbers(dtype, *lead, 48), numbers(dtype, 24, 48), numbers(dtype, 24)
    given = [x, weight, *([bias] if with_bias else [])]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    upstream = torch.randn(*lead, 24).to(dtype)
    out, true = linear(*given), F.linear(*exact)
    assert out.dtype == dtype
    gradients = torch.autograd.grad(out, given, upstream)
    truths = torch.autograd.grad(true, exact, upstream.double())
    for ours, theirs in zip((out, *gradients), (true, *truths), strict=True):
        # Half a unit of the last place, and what sums in fp32 leave where terms cancel.
        torch.testing.assert_close(ours.double(), theirs, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF_WIDTH)
def test_only_what_was_there_is_kept_for_the_backward_pass(dtype, monkeypatch):
    monkeypatch.setattr(products, "is_slow", lambda dtype: True)
    x, weight = numbers(dtype, 25, 16), numbers(dtype, 8, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        linear(x, weight)
    assert sorted(kept) == sorted([x.data_ptr(), weight.data_ptr()])


def test_no_wide_copy_is_ever_whole(monkeypatch):
    monkeypatch.setattr(products, "is_slow", lambda dtype: True)
    x, weight = numbers(torch.bfloat16, 8192, 16), numbers(torch.bfloat16, 8192, 16).detach()
    whole = 8192 * 8192 * torch.float32.itemsize  # in bf16 the product and its gradient are half of it each
    assert most_allocated(lambda: linear(x, weight).sum().backward(), torch.device("cpu")) < 1.25 * whole
    torch.testing.assert_close(
        x.grad[:1].double(), weight.double().sum(0, keepdim=True), rtol=0.004, atol=1e-4
    )


def test_only_what_is_asked_for_is_computed(monkeypatch):
    monkeypatch.setattr(products, "is_slow", lambda dtype: True)
    x, weight = numbers(torch.bfloat16, 25, 16), numbers(torch.bfloat16, 8, 16).detach()
    linear(x, weight).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert weight.grad is None


def test_a_model_stays_the_model_it_is(slow, tmp_path):
    lm = random_language_model(resolve_model(str(tiny_qwen2(tmp_path))), torch.device("cpu"))
    names = list(lm.state_dict())
    linears = [module for module in lm.modules() if isinstance(module, nn.Linear)]
    assert linears
    ids = torch.arange(32).view(1, 32)
    logits = lm(ids).logits
    assert torch.equal(deepcopy(lm)(ids).logits, logits)
    for module in linears:
        module.__class__ = nn.Linear
    torch.testing.assert_close(lm(ids).logits, logits, rtol=0.05, atol=0.02)
    assert list(widen_products(lm).state_dict()) == names
