"""Attention in fp32 of numbers that a processor has no instructions for, against double precision."""

import math

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from roi_lightning import products
from roi_lightning.attention import widen_attention
from roi_lightning.bench.timing import most_allocated
from roi_lightning.language_model import random_language_model
from roi_lightning.sources import resolve_model
from tiny_models import tiny_qwen2

HALF_WIDTH = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


class Grouped(nn.Module):
    """What transformers' functions ask of an attention layer: three query heads to a head of keys."""

    num_key_value_groups = 3
    is_causal = True


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(products, "is_slow", lambda dtype: dtype.itemsize == 2)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(products, "is_slow", lambda dtype: False)


def attend(query, key, value, mask=None, **options):
    """[batch, heads, tokens, size] each -> [batch, tokens, heads, size]."""
    widen_attention()
    return AttentionInterface()["sdpa"](Grouped(), query, key, value, mask, **options)[0]


def exactly(query, key, value, allowed, added=0.0, scale=None):
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(3, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or 1 / math.sqrt(query.shape[-1])) + added
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


def numbers(dtype, tokens=20, size=16):
    shapes = (2, 6, tokens, size), (2, 2, tokens, size), (2, 2, tokens, size)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def causal(tokens=20):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def masks(dtype):
    """By kind: what is given, what it allows, what it adds."""
    window = causal() & ~causal().tril(-6)
    added = torch.randn(1, 1, 20, 20).to(dtype)
    return {
        "causal": (None, causal(), 0.0),
        "allowed": (window.expand(2, 1, 20, 20), window, 0.0),
        "added": (added.masked_fill(~window, -torch.inf), window, added.double()),
    }


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("dtype", HALF_WIDTH)
@pytest.mark.parametrize("kind", ["causal", "allowed", "added"])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_attention_and_gradients_are_rounded_once(dtype, kind, scale):
    torch.manual_seed(0)
    given = numbers(dtype)
    mask, allowed, added = masks(dtype)[kind]
    out = attend(*given, mask, scaling=scale)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    true = exactly(*exact, allowed, added, scale)
    upstream = torch.randn_like(true).to(dtype)
    gradients = torch.autograd.grad(out, given, upstream)
    truths = torch.autograd.grad(true, exact, upstream.double())
    for ours, theirs in zip((out, *gradients), (true, *truths), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-5)


@pytest.mark.usefixtures("slow")
def test_autocast_does_not_round_within():
    torch.manual_seed(0)
    given = numbers(torch.bfloat16)
    alone = attend(*given)
    with torch.autocast("cpu", torch.bfloat16):
        within = attend(*given)
    assert torch.equal(alone, within)
    upstream = torch.randn_like(alone)
    for ours, theirs in zip(
        torch.autograd.grad(within, given, upstream), torch.autograd.grad(alone, given, upstream), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("slow")
def test_nothing_wide_is_kept_for_the_backward_pass():
    given = numbers(torch.bfloat16, tokens=512)
    outputs = []
    most = most_allocated(lambda: outputs.extend(attend(*given) for _ in range(20)), CPU)
    # Twenty outputs, and within one call at a time at most ten tensors twice as wide.
    assert most < (20 + 10 * 2) * outputs[0].nbytes


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_processors_keep_transformers_own(dtype):
    torch.manual_seed(0)
    query, key, value = numbers(dtype)
    own = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(attend(query, key, value), own.transpose(1, 2))


@pytest.mark.usefixtures("slow")
def test_a_bias_by_position_is_left_to_transformers():
    torch.manual_seed(0)
    given, bias = numbers(torch.bfloat16), torch.randn(1, 6, 20, 20).bfloat16()
    out = attend(*given, position_bias=bias)
    torch.testing.assert_close(out.double(), exactly(*given, causal(), bias.double()), rtol=0.05, atol=0.05)


@pytest.fixture
def lm(tmp_path):
    """A model in bfloat16, loaded where transformers' own function was in place before."""
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    return random_language_model(resolve_model(str(tiny_qwen2(tmp_path))), CPU)


@pytest.mark.parametrize("slow", [True, False])
def test_loaded_models_attend_in_fp32_where_that_is_quicker(slow, lm, monkeypatch):
    monkeypatch.setattr(products, "is_slow", lambda dtype: slow and dtype.itemsize == 2)
    seen, attend = set(), torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        seen.update((query.dtype, key.dtype, value.dtype))
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    assert lm(torch.arange(12).view(1, 12)).logits.dtype == torch.bfloat16
    assert seen == {torch.float32 if slow else torch.bfloat16}


@pytest.mark.parametrize("padded", [False, True])
def test_models_attend_alike(padded, lm, monkeypatch):
    found = []
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0 if padded else 1
    for answer in (True, False):
        monkeypatch.setattr(products, "is_slow", lambda dtype, answer=answer: answer)
        found.append(lm(ids, attention_mask=mask).logits.float())
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)
