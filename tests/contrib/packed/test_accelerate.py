"""Models with packed layers against the dense ones."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.tiny_models import tiny_gpt2, tiny_llama, tiny_mamba, tiny_mixtral, tiny_qwen2
from roi_lightning.contrib.packed import accelerate, unpack
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model

BUILDERS = [tiny_llama, tiny_qwen2, tiny_gpt2]


def prune(lm, pattern="2:4", layers=None):
    """Zero weights by magnitude, in place."""
    rule = NMPattern(pattern)
    with torch.no_grad():
        for layer in (layers or prunable_layers(lm)).values():
            if layer.shape[1] % rule.m == 0:
                layer.of(lm).masked_fill_(~rule.top(layer.of(lm).abs()), 0)
    return lm


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Copies of small models whose layers are 2:4."""
    made = {
        builder: prune(AutoModelForCausalLM.from_pretrained(builder(tmp_path_factory.mktemp("lm"))).eval())
        for builder in BUILDERS
    }
    return lambda builder=tiny_llama: deepcopy(made[builder])


def ids(rows=2, length=9):
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(lm):
    return lm(ids()).logits


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_computes_what_it_did(builder, dtype, sparse):
    lm = sparse(builder).to(dtype)
    before, exact = logits(lm), logits(deepcopy(lm).double())
    accelerate(lm)
    error, rounding = ((x.double() - exact).norm() / exact.norm() for x in (logits(lm), before))
    assert error < 1.2 * rounding + torch.finfo(dtype).eps


@pytest.mark.parametrize("builder", BUILDERS)
def test_every_layer_is_packed_and_said_to_be(builder, sparse):
    lm = sparse(builder)
    dense = {name: layer.of(lm).clone() for name, layer in prunable_layers(lm).items()}
    result = accelerate(lm)
    assert result.packed.keys() == dense.keys()
    assert not result.left
    for name, weight in dense.items():
        assert lm.get_submodule(name) is result.packed[name]
        assert torch.equal(unpack(result.packed[name].packed), weight)
    assert result.bytes_before == sum(weight.nbytes for weight in dense.values())
    size = lm.dtype.itemsize
    assert result.bytes_after * 8 * size == result.bytes_before * (4 * size + 1)
    names = {name.rpartition(".")[2] for name in lm.state_dict() if name.rpartition(".")[0] in dense}
    assert {"weight", "weight_indices"} <= names <= {"weight", "weight_indices", "bias"}


def held(lm):
    """Bytes of all memory that a model's tensors lie in."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in (*lm.parameters(), *lm.buffers())
    }
    return sum(storages.values())


@pytest.mark.parametrize("left", [0, 1])
def test_stacks_of_experts_are_freed(left, tmp_path):
    lm = load_language_model(resolve_model(str(tiny_mixtral(tmp_path)))).eval()
    dense = dict(list(prunable_layers(lm).items())[-left:]) if left else {}
    prune(lm, layers={name: layer for name, layer in prunable_layers(lm).items() if name not in dense})
    before, exact = held(lm), logits(lm)
    of_dense = {name: layer.of(lm).clone() for name, layer in dense.items()}
    result = accelerate(lm)
    assert list(result.left) == list(dense)
    assert held(lm) == before - result.bytes_before + result.bytes_after
    assert all(torch.equal(lm.get_submodule(name).weight, weight) for name, weight in of_dense.items())
    torch.testing.assert_close(logits(lm), exact)


@pytest.mark.filterwarnings("ignore:MambaForCausalLM has 4 matrices of a layout that is not known")
def test_a_weight_that_the_model_reads_itself_stays_dense(tmp_path):
    lm = prune(AutoModelForCausalLM.from_pretrained(tiny_mamba(tmp_path)).eval())
    exact = logits(lm)
    assert list(accelerate(lm).left) == [f"backbone.layers.{block}.mixer.dt_proj" for block in (0, 1)]
    torch.testing.assert_close(logits(lm), exact)


def test_a_weight_of_several_layers_is_packed_once(sparse):
    lm = sparse()
    one, other = lm.model.layers[0].mlp, lm.model.layers[1].mlp
    other.up_proj.weight = one.up_proj.weight
    other.down_proj = one.down_proj
    before, exact = held(lm), logits(lm)
    result = accelerate(lm)
    assert held(lm) == before - result.bytes_before + result.bytes_after
    assert other.up_proj.weight.data_ptr() == one.up_proj.weight.data_ptr()
    assert other.down_proj is one.down_proj
    torch.testing.assert_close(logits(lm), exact)


def test_layers_that_are_not_2_of_4_stay_dense(sparse):
    lm = sparse()
    block, head = lm.model.layers[1], lm.lm_head
    block.self_attn.q_proj.weight.data[3, 8:11] = 1
    block.self_attn.k_proj.weight.data[:] = 1
    head.weight = lm.model.layers[0].self_attn.q_proj.weight
    exact = logits(lm)
    result = accelerate(lm)
    attention = "model.layers.1.self_attn"
    not_sparse = "the weight is not 2:4 sparse"
    assert result.left == {
        "model.layers.0.self_attn.q_proj": "lm_head has the same weight",
        f"{attention}.q_proj": not_sparse,
        f"{attention}.k_proj": not_sparse,
    }
    assert len(result.packed) == 11
    torch.testing.assert_close(logits(lm), exact)


def dense(lm):
    for layer in prunable_layers(lm).values():
        layer.of(lm).fill_(1)
    return lm


def accelerated(lm):
    accelerate(lm)
    return lm


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda lm: prune(dense(lm), "4:8"),
            "none of 14 layers .*layers keep 4 of 8.*only 2:4 can be accelerated",
        ),
        (dense, "layers are dense.*prune or learn with --pattern 2:4"),
        (lambda lm: lm.train(), "train mode.*eval"),
        (accelerated, "14 layers of this model are packed already"),
    ],
)
def test_models_that_cannot_be_accelerated_are_left_alone(spoil, message, sparse):
    lm = spoil(sparse())
    modules = list(lm.modules())
    with pytest.raises(UserError, match=message):
        accelerate(lm)
    assert all(mine is its for mine, its in zip(lm.modules(), modules, strict=True))


def test_what_transformers_could_not_read_is_not_saved(sparse, tmp_path):
    lm = accelerated(sparse())
    with pytest.raises(UserError, match="roi-lightning pack"):
        lm.save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match="runs packed and can't be saved"):
        deepcopy(lm).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
