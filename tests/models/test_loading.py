import math
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.plan_table import architecture
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import (
    prunable_layers,
)
from roi_lightning.models.loading import freeze, meta_language_model
from roi_lightning.samplers import GumbelTopK

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64}
CONFIGS = {
    "llama": partial(AutoConfig.for_model, "llama", **SIZES, intermediate_size=128),
    "qwen2": partial(AutoConfig.for_model, "qwen2", **SIZES, intermediate_size=128, num_key_value_heads=2),
    "gpt2": partial(AutoConfig.for_model, "gpt2", **GPT2),
    "opt": partial(AutoConfig.for_model, "opt", **SIZES, **OPT),
    "gpt_neox": partial(AutoConfig.for_model, "gpt_neox", **SIZES, intermediate_size=128),
}
# In Table 3.
MILLIONS = {"0.5B": "357.8", "1.5B": "1310", "3B": "2775", "7B": "6525"}


@pytest.mark.parametrize(("size", "millions"), MILLIONS.items())
def test_counts_are_those_of_the_papers_table(size, millions):
    sizes = architecture(f"Qwen/Qwen2.5-{size}")
    lm = meta_language_model(sizes)
    assert {parameter.device.type for parameter in lm.parameters()} == {"meta"}
    layers, pattern = prunable_layers(lm), NMPattern("2:4")
    count = sum(layer.numel for layer in layers.values())
    hidden, keys = (
        sizes.hidden_size,
        sizes.hidden_size * sizes.num_key_value_heads // sizes.num_attention_heads,
    )
    by_hand = hidden * (2 * hidden + 2 * keys + 3 * sizes.intermediate_size)
    assert count == sizes.num_hidden_layers * by_hand
    digits = len(millions.partition(".")[2])
    assert f"{count / 1e6:.{digits}f}" == millions
    shapes = [GumbelTopK().logits_shape(layer.shape, pattern) for layer in layers.values()]
    assert sum(math.prod(shape) for shape in shapes) == count


ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        (["*"], [], {(b, n) for b in "01" for n in ALL}),
        (["*"], ["q_proj"], {(b, n) for b in "01" for n in ALL - {"q_proj"}}),
        (["*"], ["model.layers.0.*"], {("1", n) for n in ALL}),
        (["mlp.*"], [], {(b, n) for b in "01" for n in ("gate_proj", "up_proj", "down_proj")}),
        (["[qk]_proj", "o_proj"], ["layers.1.*"], {("0", n) for n in ("q_proj", "k_proj", "o_proj")}),
        (["model.layers.1.mlp.up_proj"], [], {("1", "up_proj")}),
    ],
)
def test_targets_and_ignore_choose_by_glob(targets, ignore, expected):
    lm = meta_language_model(CONFIGS["llama"]())
    names = list(prunable_layers(lm, targets, ignore))
    assert {(name.split(".")[2], name.rpartition(".")[2]) for name in names} == expected
    assert len(names) == len(expected)
    order = [name for name, _ in lm.named_modules()]
    assert names == sorted(names, key=order.index)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"targets": ["nothing_*"]}, "nothing_*"),
        ({"ignore": ["q_proj", "typo_proj"]}, "typo_proj"),
        ({"targets": ["lm_head"]}, "lm_head"),
        ({"ignore": ["proj"]}, "proj"),
        ({"targets": ["mlp.*"], "ignore": ["mlp.*"]}, "mlp.*"),
    ],
)
def test_patterns_that_leave_nothing_are_named(options, named):
    with pytest.raises(UserError) as caught:
        prunable_layers(meta_language_model(CONFIGS["llama"]()), **options)
    assert repr(named) in str(caught.value)


DROPOUTS = {
    "llama": {"attention_dropout": 0.5},
    "qwen2": {"attention_dropout": 0.5},
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5, "layerdrop": 0.5},
    "gpt_neox": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_freezing_leaves_train_mode_without_any_randomness(kind, attention):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(CONFIGS[kind](attn_implementation=attention, **DROPOUTS[kind]))
    tokens = torch.randint(0, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    lm.train()
    # OPT may also drop whole layers, all of them at times: several forwards, not two.
    outputs = [lm(tokens).logits for _ in range(8)]
    assert not all(torch.equal(output, outputs[0]) for output in outputs), "the dropouts were never on"
    assert freeze(lm) is lm
    assert all(module.training for module in lm.modules())
    assert all(module.p == 0 for module in lm.modules() if isinstance(module, nn.Dropout))
    assert not any(parameter.requires_grad for parameter in lm.parameters())
    in_train = lm(tokens).logits
    for _ in range(3):
        assert torch.equal(lm(tokens).logits, in_train)
    torch.testing.assert_close(in_train, lm.eval()(tokens).logits)
