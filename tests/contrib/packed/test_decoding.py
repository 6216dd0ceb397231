"""Decoding in one C++ call for each token: what a model's own blocks compute, whatever is done to it or its cache."""

import copy
import logging
from functools import partial

import pytest
import torch
from test_accelerate import prune
from transformers import AutoModelForCausalLM, DynamicCache

from helpers.tiny_models import tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3
from roi_lightning.contrib.packed import PackedLinear, accelerate
from roi_lightning.contrib.packed import token_decoder as token
from roi_lightning.contrib.packed.cache import PreallocatedLayer
from roi_lightning.contrib.packed.format import quantize
from roi_lightning.models.layers import prunable_layers
from roi_lightning.utils import cpp_extension

# Steps of sixteen and of thirty-two values both leave a rest.
ODD = {"hidden_size": 80, "intermediate_size": 144, "num_attention_heads": 5, "num_key_value_heads": 1}
ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": tiny_llama,
    "llama, odd sizes": partial(tiny_llama, **ODD),
    "llama, biases": partial(tiny_llama, attention_bias=True, mlp_bias=True),
    "llama, yarn": partial(tiny_llama, rope_parameters=ROPE),
    "mistral": partial(tiny_mistral, sliding_window=None),
    "qwen2": partial(tiny_qwen2, dtype=torch.float32),
    "qwen3": tiny_qwen3,
}


def dense(builder, folder, dtype=torch.float32):
    """A model whose layers are 2:4 except the first one's queries."""
    lm = AutoModelForCausalLM.from_pretrained(builder(folder), dtype=dtype).eval()
    prune(lm, layers={name: x for name, x in prunable_layers(lm).items() if "0.self_attn.q_proj" not in name})
    with torch.no_grad():
        for parameter in lm.parameters():  # norms and biases that do something
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    return lm


def fused(lm, int8=False):
    lm = copy.deepcopy(lm)
    assert accelerate(lm).not_fused is None
    for name, layer in list(lm.named_modules()):
        if int8 and isinstance(layer, PackedLinear):
            lm.set_submodule(name, PackedLinear(quantize(layer.packed), layer.bias))
    return lm


def text(length=40, rows=1):
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(1))


def start(lm, ids, length=7):
    """A cache with the first tokens of a text."""
    past = DynamicCache(config=lm.config)
    lm(ids[:, :length], past_key_values=past)
    return past


def continued(lm, ids, past, first=7, **options):
    """The logits of each next token, one call for each: [1, tokens, vocabulary]."""
    tokens = range(first, ids.shape[1])
    return torch.cat([lm(ids[:, i : i + 1], past_key_values=past, **options).logits for i in tokens], 1)


def is_fused(past):
    return all(isinstance(layer, PreallocatedLayer) for layer in past.layers)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return dense(tiny_llama, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_reading_the_text_at_once(tmp_path, name, int8):
    lm, ids = fused(dense(MODELS[name], tmp_path / "lm"), int8), text()
    past = start(lm, ids)
    found = continued(lm, ids, past)
    assert is_fused(past)
    torch.testing.assert_close(found, lm(ids).logits[:, 7:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_as_near_to_the_exact_logits_as_the_model_itself(tmp_path, dtype):
    exact = dense(partial(tiny_llama, dtype=dtype), tmp_path / "lm", dtype).float()
    ids, wanted = text(), exact(text()).logits[:, 7:]
    lm = fused(copy.deepcopy(exact).to(dtype))
    past = start(lm, ids)
    found = continued(lm, ids, past)
    assert is_fused(past)
    assert found.dtype == dtype
    rounding = (copy.deepcopy(exact).to(dtype)(ids).logits[:, 7:].float() - wanted).norm()
    assert (found.float() - wanted).norm() < 1.2 * rounding


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "temperature": 0.7}, {"num_beams": 3}, {"repetition_penalty": 1.3}],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2])
def test_generation_is_the_model_s_own(llama, options, rows):
    both = []
    for lm in (llama, fused(llama)):
        torch.manual_seed(0)
        both.append(lm.generate(text(9, rows), max_new_tokens=20, min_new_tokens=20, **options))
    assert torch.equal(*both)


def test_caches_grow_beyond_their_room(llama, monkeypatch):
    monkeypatch.setattr(token, "_SPARE", 3)
    lm, ids = fused(llama), text(100)
    past = start(lm, ids, 2)
    found = continued(lm, ids, past, 2)
    torch.testing.assert_close(found, llama(ids).logits[:, 2:], rtol=1e-4, atol=1e-5)
    assert past.get_seq_length() == 100
    own = DynamicCache(config=llama.config)
    llama(ids, past_key_values=own)
    for mine, its in zip(past.layers, own.layers, strict=True):
        torch.testing.assert_close(mine.keys, its.keys)
        torch.testing.assert_close(mine.values, its.values)


def test_a_cache_may_be_changed_in_between(llama):
    lm, ids = fused(llama), text()
    wanted = llama(ids).logits
    past = start(lm, ids)
    continued(lm, ids[:, :20], past)
    past.crop(-10)  # some tokens taken back
    assert past.get_seq_length() == 10
    branch = copy.deepcopy(past)  # two ways on
    torch.testing.assert_close(continued(lm, ids, past, 10), wanted[:, 10:], rtol=1e-4, atol=1e-5)
    lm(ids[:, 10:15], past_key_values=branch)  # several tokens at once
    torch.testing.assert_close(continued(lm, ids, branch, 15), wanted[:, 15:], rtol=1e-4, atol=1e-5)
    assert is_fused(branch)
    past.reset()
    lm(ids[:, :5], past_key_values=past)
    torch.testing.assert_close(continued(lm, ids, past, 5), wanted[:, 5:], rtol=1e-4, atol=1e-5)


# What goes the model's own way.


def unfused(lm, ids=None, **options):
    """A step that must not be taken in C++, beside the same of the dense model."""
    past = start(lm, text() if ids is None else ids)
    out = lm((text() if ids is None else ids)[:, 7:8], past_key_values=past, **options)
    assert not is_fused(past)
    return out


def test_padding_is_seen(llama):
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, 0] = 0
    both = [unfused(lm, attention_mask=mask).logits for lm in (llama, fused(llama))]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)


def test_several_sequences_gradients_and_train_mode(llama):
    lm = fused(llama)
    unfused(lm, text(rows=2))
    with torch.enable_grad():
        unfused(lm)
    unfused(lm.train())


# Weights.


def replace(norm):
    norm.weight = torch.nn.Parameter(norm.weight * 2, requires_grad=False)


CHANGES = {
    "in place": lambda lm: lm.model.layers[0].input_layernorm.weight.mul_(2),
    "cast": lambda lm: lm.bfloat16().float(),
    "replaced": lambda lm: replace(lm.model.layers[0].input_layernorm),
    "hooked": lambda lm: lm.model.layers[1].register_forward_hook(lambda layer, given, out: out * 2),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("prompt", [1, 7])
def test_a_model_may_change_between_two_texts(llama, how, prompt):
    lm, other, ids = fused(llama), copy.deepcopy(llama), text()
    continued(lm, ids, start(lm, ids, prompt), prompt)
    for changed in (lm, other):
        CHANGES[how](changed)
    found = continued(lm, ids, start(lm, ids, prompt), prompt)
    torch.testing.assert_close(found, other(ids).logits[:, prompt:], rtol=1e-4, atol=1e-5)


# Threads and CPUs.


@pytest.fixture
def compile_again():
    """Have kernels compiled anew, and once more afterwards."""
    token.library.cache_clear()
    cpp_extension.load.cache_clear()
    yield
    token.library.cache_clear()
    cpp_extension.load.cache_clear()
    token.kernels.disabled = False


def test_without_a_compiler_the_model_decodes_itself(llama, compile_again, monkeypatch, caplog):
    def no_compiler(build):
        raise OSError("none is installed")

    monkeypatch.setattr(token, "load", no_compiler)
    lm, ids = copy.deepcopy(llama), text()
    with caplog.at_level(logging.WARNING):
        assert accelerate(lm).not_fused == "there is no kernel for torch.float32"
    assert "none is installed" in caplog.text
    past = start(lm, ids)
    torch.testing.assert_close(continued(lm, ids, past), llama(ids).logits[:, 7:], rtol=1e-4, atol=1e-5)
    assert not is_fused(past)
