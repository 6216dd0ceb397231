import copy
import gc
import weakref

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import freeze
from roi_lightning.samplers import Draw, GumbelTopK, StraightThrough
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear, attach, fixed_masks

PATTERN = NMPattern("2:4")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
KINDS = ["qwen2", "gpt2"]


def build(kind: str):
    """A tiny frozen model whose every parameter is random, biases and norms too."""
    if kind == "gpt2":
        lm = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    else:
        lm = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return freeze(lm)


def sparsify(lm, sampler=None, **state):
    shared = SharedState(PATTERN, sampler=sampler or GumbelTopK(), **state)
    layers = attach(lm, prunable_layers(lm), shared, SparseLinear)
    generator = torch.Generator().manual_seed(2)
    for layer in layers.values():
        layer.logits.data = torch.randn(layer.logits.shape, generator=generator) * 0.1
    return layers, shared


def random_masks(layers, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {n: PATTERN.top(torch.rand(x.weight.shape, generator=generator)) for n, x in layers.items()}


def masked_copy(lm, masks):
    plain = copy.deepcopy(lm)
    with torch.no_grad():
        for name, mask in masks.items():
            weight = plain.get_submodule(name).weight
            weight.masked_fill_(~(mask.T if isinstance(lm, GPT2LMHeadModel) else mask), 0.0)
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_dense_mode_changes_no_bit(kind):
    lm = build(kind)
    before = lm(TOKENS).logits
    sparsify(lm)
    assert torch.equal(lm(TOKENS).logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_names_stay_and_logits_come_beside_them(kind):
    lm = build(kind)
    before = dict(lm.named_parameters())
    layers, _ = sparsify(lm)
    after = dict(lm.named_parameters())
    # A `Conv1D`'s weight is copied, transposed.
    copied = {f"{name}.weight" for name, layer in layers.items() if layer.transposed}
    assert len(copied) == (len(layers) if kind == "gpt2" else 0)
    for name, parameter in before.items():
        if name in copied:
            assert torch.equal(after[name], parameter.T)
            assert after[name].is_contiguous()
        else:
            assert after[name] is parameter
    assert set(after) - set(before) == {f"{name}.logits" for name in layers}
    assert all(after[f"{name}.weight"] is layer.weight for name, layer in layers.items())
    assert {name for name, parameter in after.items() if parameter.requires_grad} == set(after) - set(before)
    for layer in layers.values():
        assert layer.logits.dtype == torch.float32
        assert layer.logits.shape == layer.weight.shape


def packed(masks):
    return {name: LayerMask.from_bool(mask) for name, mask in masks.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_mode_is_a_model_with_masked_weights(kind):
    lm = build(kind)
    dense, plain = lm(TOKENS).logits, copy.deepcopy(lm)
    layers, state = sparsify(lm)
    masks = random_masks(layers)
    with fixed_masks(layers, packed(masks)):
        assert state.mode == "fixed"
        sparse = lm(TOKENS).logits
    assert torch.equal(sparse, masked_copy(plain, masks)(TOKENS).logits)
    assert not torch.allclose(sparse, dense)
    assert torch.equal(lm(TOKENS).logits, dense)


def test_fixed_masks_default_to_the_top_of_the_logits():
    lm = build("gpt2")
    layers, _ = sparsify(lm)
    with fixed_masks(layers):
        for layer in layers.values():
            effective, top = layer.effective_weight(), PATTERN.top(layer.logits.detach())
            assert torch.equal(effective, layer.weight * top)
            assert not torch.signbit(effective[~top]).any(), "minus zero"
            assert torch.equal(layer.hard_mask(), top)


def test_fixed_masks_restore_the_mode_and_free_the_weights_even_after_an_error():
    lm = build("qwen2")
    draw = Draw(0, 0, 0.1, 0.1)
    layers, state = sparsify(lm, mode="sample", draw=draw)
    refs = []

    def fail_inside():
        with fixed_masks(layers, packed(random_masks(layers))):
            refs.extend(weakref.ref(layer.effective_weight()) for layer in layers.values())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    gc.collect()
    assert (state.mode, state.draw) == ("sample", draw)
    assert len(refs) == 14
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize("kind", KINDS)
def test_sample_mode_multiplies_by_the_drawn_mask(kind):
    lm = build(kind)
    plain, draw = copy.deepcopy(lm), Draw(4, 5, 0.1, 0.1)
    layers, _ = sparsify(lm, StraightThrough(), mode="sample", draw=draw)
    masks = {}
    for name, layer in layers.items():
        ones = torch.ones_like(layer.weight)
        sampled = StraightThrough().masked_weight(ones, layer.logits.detach(), PATTERN, draw, name)
        masks[name] = sampled == 1
    assert torch.equal(lm(TOKENS).logits, masked_copy(plain, masks)(TOKENS).logits)


@pytest.mark.parametrize("sampler", [GumbelTopK(), StraightThrough()])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_no_bit_of_the_gradients(kind, sampler):
    lm = build(kind)
    layers, _ = sparsify(lm, sampler, mode="sample", draw=Draw(1, 2, 0.1, 0.3))

    def gradients():
        lm.zero_grad()
        lm(TOKENS, labels=TOKENS).loss.backward()
        return [layer.logits.grad for layer in layers.values()]

    plain, calls = gradients(), []
    handle = next(iter(layers.values())).register_forward_hook(lambda *_: calls.append(1))
    # By position: older releases call the method and its argument `gradient_checkpointing_...`.
    enable = getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    again = gradients()
    handle.remove()
    assert len(calls) == 2, "the forward pass was not computed again"
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() > 0


class Narrow(GumbelTopK):
    """A sampler as one first writes it: it gives one row."""

    def masked_weight(self, *args, **kwargs):
        return super().masked_weight(*args, **kwargs)[:1]


def test_a_sampler_that_gives_another_shape_is_named():
    dense = torch.nn.Linear(8, 4)
    layer = SparseLinear(dense, "mlp.up_proj", SharedState(PATTERN, "sample", sampler=Narrow()))
    layer.state.draw = Draw(0, 0, 1.0, 1.0)
    with pytest.raises(UserError, match=r"Narrow\.masked_weight made \[1, 8\] of .* mlp\.up_proj, \[4, 8\]"):
        layer(torch.ones(2, 8))
