"""The walk through the blocks against whole forward passes of models pruned by hand."""

from functools import partial
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from test_sparsegpt import errors, slow_sparsegpt
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconMambaConfig,
    JambaConfig,
    MambaConfig,
)

from helpers.lab import brute_top
from helpers.tiny_models import tiny_gemma2, tiny_gpt2, tiny_llama, tiny_mixtral, tiny_qwen2, tiny_qwen3_moe
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import freeze, load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import Calibration, SparseGPT, Wanda, prune_layers
from roi_lightning.oneshot.prune import calibration_windows

PATTERN = NMPattern("2:4")


BUILDERS = {
    "llama": tiny_llama,
    "qwen2": lambda path: tiny_qwen2(path, dtype=torch.float32),
    "gpt2": tiny_gpt2,
    "gemma2": tiny_gemma2,
    "mixtral": tiny_mixtral,
    "qwen3_moe": tiny_qwen3_moe,
}


@pytest.fixture(params=BUILDERS)
def lm(request, tmp_path):
    return load_language_model(resolve_model(str(BUILDERS[request.param](tmp_path / "m"))))


@pytest.fixture
def llama(tmp_path):
    return load_language_model(resolve_model(str(tiny_llama(tmp_path / "m"))))


@pytest.fixture
def windows():
    return torch.randint(0, 250, (3, 24), generator=torch.Generator().manual_seed(0))


def inputs_of(lm, windows, layers):
    """What layers multiply by in whole forward passes, [tokens, in] by name; experts are run one after another."""
    seen = {name: [] for name in layers}
    linear, addmm = F.linear, torch.addmm

    def record(x, weight):
        for name, layer in layers.items():
            own = lm.get_parameter(layer.parameter)
            if weight.data_ptr() == (own if layer.expert is None else own[layer.expert]).data_ptr():
                seen[name].append(x.detach().flatten(0, -2))

    def recording_linear(x, weight, bias=None):
        record(x, weight)
        return linear(x, weight, bias)

    def recording_addmm(bias, x, weight):
        record(x, weight)
        return addmm(bias, x, weight)

    lm.set_experts_implementation("eager")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(F, "linear", recording_linear)
        patch.setattr(torch, "addmm", recording_addmm)
        for window in windows:
            lm(input_ids=window[None])
    return {name: torch.cat(rows) for name, rows in seen.items()}


def block_of(name):
    return next(part for part in name.split(".") if part.isdigit())


def by_block(layers):
    blocks = {}
    for name, layer in layers.items():
        blocks.setdefault(block_of(name), {})[name] = layer
    return blocks.values()


def wanda_mask(weight, inputs):
    return brute_top(weight.double().abs() * inputs.double().square().sum(0).sqrt(), 2, 4)


def alike(got, wanted):
    """Equal except for near-ties: the reference works in fp64."""
    return (got == wanted).double().mean() > 0.998


@pytest.mark.parametrize("activations", ["sequential", "dense"])
def test_wanda_equals_whole_forward_passes(lm, windows, activations):
    layers = prunable_layers(lm)
    calibration = Calibration(windows, activations)
    got = {name: pruned.mask for name, pruned in prune_layers(lm, layers, Wanda(), PATTERN, calibration)}
    assert list(got) == list(layers)
    for block in by_block(layers):
        inputs = inputs_of(lm, windows, block)
        for name, layer in block.items():
            assert alike(got[name], wanda_mask(layer.of(lm), inputs[name])), name
        if activations == "sequential":
            for name, layer in block.items():
                layer.of(lm).masked_fill_(~got[name], 0)


def test_sparsegpt_equals_whole_forward_passes_and_slow_solves(llama, windows):
    layers = prunable_layers(llama, ["k_proj", "v_proj"])
    calibration = Calibration(windows)
    got = dict(prune_layers(llama, layers, SparseGPT(), PATTERN, calibration))
    for block in by_block(layers):
        inputs = inputs_of(llama, windows, block)
        for name, layer in block.items():
            weight = layer.of(llama)
            mask, wanted = slow_sparsegpt(weight, inputs[name], 2, 4)
            assert alike(got[name].mask, mask), name
            same = (got[name].mask == mask).all(1)
            plain = weight.masked_fill(~mask, 0)
            same &= errors(weight, wanted, inputs[name]) <= errors(weight, plain, inputs[name])
            assert same.double().mean() > 0.9
            assert (got[name].weight.double() - wanted)[same].abs().max() < 1e-4
        for name, layer in block.items():
            layer.of(llama).copy_(got[name].weight)


MAMBA = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXERS = {
    "mamba": MambaConfig(**MAMBA, time_step_rank=8),
    "falcon_mamba": FalconMambaConfig(**MAMBA, time_step_rank=8),
    "jamba": JambaConfig(**MAMBA, **HEADS, mamba_dt_rank=8),
}


def time_steps_of(lm, windows, name):
    """What a mixer's `dt_proj` is multiplied by in whole forward passes, [tokens, 8]: it is never called."""
    mixer = lm.get_submodule(name.removesuffix(".dt_proj"))
    before, seen = getattr(mixer, "dt_layernorm", mixer.x_proj), []
    handle = before.register_forward_hook(lambda *x: seen.append(x[2][..., :8].flatten(0, -2)))
    with torch.no_grad():
        for window in windows:
            lm(input_ids=window[None])
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("activations", ["sequential", "dense"])
@pytest.mark.parametrize("kind", MIXERS)
def test_a_weight_that_another_module_multiplies_by_is_measured(kind, activations, windows):
    torch.manual_seed(0)
    lm = freeze(AutoModelForCausalLM.from_config(MIXERS[kind]))
    layers = prunable_layers(lm, ["*_proj"])
    got = dict(prune_layers(lm, layers, Wanda(), PATTERN, Calibration(windows, activations)))
    for block in by_block(layers):
        (name,) = (name for name in block if name.endswith(".dt_proj"))
        wanted = wanda_mask(layers[name].of(lm), time_steps_of(lm, windows, name))
        assert alike(got[name].mask, wanted), name
        if activations == "sequential":
            for name, layer in block.items():
                layer.of(lm).masked_fill_(~got[name].mask, 0)


def test_a_product_with_a_transposed_weight_is_measured(windows):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    lm = freeze(AutoModelForCausalLM.from_config(FalconConfig(**sizes)))
    layers, seen = prunable_layers(lm), {}
    for name in layers:
        own = seen.setdefault(name, [])
        lm.get_submodule(name).register_forward_pre_hook(
            lambda _, x, own=own: own.append(x[0].flatten(0, -2))
        )
    with torch.no_grad():
        lm(input_ids=windows)
    for name, pruned in prune_layers(lm, layers, Wanda(), PATTERN, Calibration(windows, "dense")):
        assert alike(pruned.mask, wanda_mask(layers[name].of(lm), seen[name][0])), name


def hooks_of(lm):
    """All hooks; routers of mixtures have some of their own."""
    hooks = {
        name: [*x._forward_pre_hooks.values(), *x._forward_hooks.values()] for name, x in lm.named_modules()
    }
    return {name: own for name, own in hooks.items() if own}


@pytest.mark.parametrize("method", [Wanda(), SparseGPT()])
def test_the_model_is_left_as_it_was(lm, windows, method):
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    hooks = hooks_of(lm)
    layers = prunable_layers(lm)
    for stop_after in (3, None):
        walk = prune_layers(lm, layers, method, PATTERN, Calibration(windows))
        for count, _ in enumerate(walk, 1):
            if count == stop_after:
                break
        walk.close()
        after = lm.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert hooks_of(lm) == hooks


@pytest.mark.parametrize("lm", ["gemma2", "mixtral"], indirect=True)
def test_hidden_states_on_disk_give_the_same_as_in_memory(lm, windows, tmp_path):
    layers = prunable_layers(lm)
    offload_dir = tmp_path / "deep" / "offload_dir"
    results = [
        dict(prune_layers(lm, layers, SparseGPT(), PATTERN, Calibration(windows, offload_dir=place)))
        for place in (None, offload_dir)
    ]
    for name, pruned in results[0].items():
        assert torch.equal(pruned.mask, results[1][name].mask)
        assert torch.equal(pruned.weight, results[1][name].weight)
    assert list(offload_dir.iterdir()) == []


def test_calls_that_differ_from_window_to_window_are_followed(llama, windows):
    """Positions that depend on the text: what a block is called with can't be taken from one window."""

    def shift(_module, _args, kwargs):
        ids = kwargs["input_ids"]
        return (), kwargs | {"position_ids": torch.arange(ids.shape[1])[None] * (1 + int(ids[0, 0]) % 5)}

    llama.model.register_forward_pre_hook(shift, with_kwargs=True)
    layers = prunable_layers(llama, ["o_proj"])
    inputs = inputs_of(llama, windows, layers)
    for name, pruned in prune_layers(llama, layers, Wanda(), PATTERN, Calibration(windows, "dense")):
        assert alike(pruned.mask, wanda_mask(layers[name].of(llama), inputs[name])), name


def test_a_model_that_works_between_its_blocks_is_refused(llama, windows):
    second = llama.model.layers[1]
    forward = llama.model.forward

    def between(*args, **kwargs):
        handle = second.register_forward_pre_hook(
            lambda _, inputs: (inputs[0] * 2, *inputs[1:]), prepend=True
        )
        try:
            return forward(*args, **kwargs)
        finally:
            handle.remove()

    llama.model.forward = between
    layers = prunable_layers(llama)
    with pytest.raises(UserError, match="changes the hidden states between its blocks"):
        list(prune_layers(llama, layers, Wanda(), PATTERN, Calibration(windows)))
    inputs = inputs_of(llama, windows, layers)
    for name, pruned in prune_layers(llama, layers, Wanda(), PATTERN, Calibration(windows, "dense")):
        assert alike(pruned.mask, wanda_mask(layers[name].of(llama), inputs[name])), name


def test_one_pass_of_the_whole_model_keeps_no_inputs(llama, windows):
    layers, seen = prunable_layers(llama), []

    def look(name, _layer, args):
        assert not [n for n, x in seen if x() is not None and block_of(n) != block_of(name)], name
        seen.append((name, ref(args[0])))

    for name in layers:
        llama.get_submodule(name).register_forward_pre_hook(partial(look, name))
    for _ in prune_layers(llama, layers, Wanda(), PATTERN, Calibration(windows, "dense")):
        assert not any(x() is not None for _, x in seen)
    assert len(seen) == len(windows) * len(layers), "one pass, and no other"


def test_blocks_that_share_something_that_grows_are_refused(llama, windows):
    shared = {}

    class Notes(dict):
        """No plain value: what a block finds in it depends on the blocks before."""

    notes = Notes(shared)
    for block in llama.model.layers:
        forward = block.forward
        block.forward = lambda *args, forward=forward, **kwargs: forward(
            *args, **{name: value for name, value in kwargs.items() if name != "notes"}
        )
        block.register_forward_pre_hook(lambda _, a, k: (a, k | {"notes": notes}), with_kwargs=True)
    with pytest.raises(UserError, match="hands a Notes from block to block"):
        list(prune_layers(llama, prunable_layers(llama), Wanda(), PATTERN, Calibration(windows)))


def test_more_windows_than_the_text_has_are_refused_before_any_is_gathered():
    text = SimpleNamespace(corpora=[], seq_len=8, train_tokens=87)  # asked for `windows`, it has none to give
    with pytest.raises(UserError, match="holds 10 windows of 8 tokens, 11 are asked for"):
        calibration_windows(text, 11)
