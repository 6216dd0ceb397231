"""Packed directories with int8 weights: they compute what their rounded weights stand for, and hide no damage."""

import shutil
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_packed_checkpoint import Q, logits, pruned_and_packed
from transformers import AutoModelForCausalLM

from helpers.directories import change, export_of, failed, reseal, tensors_of
from helpers.tiny_models import tiny_qwen2
from roi_lightning.contrib.packed import PackedLinear, from_packed, verify_packed, write_packed
from roi_lightning.contrib.packed.tensors import PackedTensors
from roi_lightning.export import write_export
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.stored_tensors import tensor_sha256


def rounded(weight, dim):
    """A weight as int8 leaves it, in fp32, and half a step of each row: by the documented rule alone."""
    step = weight.double().abs().amax(dim, keepdim=True).float() / 127
    step[step == 0] = 1
    return (weight.float() / step).round().clamp(-127, 127) * step, step / 2


def rounded_directory(dense, out):
    """A copy of an export, an ordinary model, whose masked weights are rounded."""
    shutil.copytree(dense, out)
    held = tensors_of(dense)
    for name, mask in MaskSet.load(dense).layers.items():
        held[name] = rounded(held[name], 0 if mask.transposed else 1)[0]
    save_file(held, out / "model.safetensors", {"format": "pt"})
    (out / "roi_sparsity.json").unlink()
    return out


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral, some experts dense"])
def test_logits_are_those_of_the_rounded_weights(tmp_path, architecture):
    dense, packed = pruned_and_packed(tmp_path, architecture, "int8")
    lm = from_packed(packed, dtype="float32")
    layers = [module for module in lm.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == len(MaskSet.load(dense).layers)
    assert {layer.weight.dtype for layer in layers} == {torch.int8}
    wanted = AutoModelForCausalLM.from_pretrained(
        rounded_directory(dense, tmp_path / "rounded"), dtype=torch.float32
    )
    torch.testing.assert_close(logits(lm), logits(wanted))


# One packed directory that is only read, or copied and spoiled.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    source, masks, dense = export_of(tiny_qwen2(folder / "base", max_position_embeddings=4096))
    sizes = write_packed(dense, folder / "packed", weights="int8")
    return SimpleNamespace(source=source, masks=masks, dense=dense, packed=folder / "packed", sizes=sizes)


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made.packed, tmp_path / "copy")


def test_unpacking_goes_to_the_original_dtype_with_exact_zeros(made):
    tensors, dense = PackedTensors(made.packed), load_file(made.dense / "model.safetensors")
    assert tensors.files.keys() == dense.keys()
    for name, mask in made.masks.layers.items():
        weight = tensors[name]
        wanted, half = rounded(dense[name], 1)
        assert torch.equal(weight, wanted.bfloat16())
        assert not weight[~mask.to_bool()].any()
        assert ((wanted - dense[name].float()).abs() <= half * 1.0001).all()
        assert torch.equal(tensors.mask(name).to_bool(), mask.to_bool())
    assert {entry["dtype"] for entry in tensors.sidecar["layers"].values()} == {"bfloat16"}


def test_bytes_are_five_bits_a_weight_and_the_scales(made):
    rows = sum(layer.shape[0] for layer in made.masks.layers.values())
    assert made.sizes.packed == made.masks.total * 5 // 8 + 4 * rows
    assert made.sizes.linears == 2 * made.masks.total


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_have_the_dtype_that_is_asked_for(made, dtype):
    lm = from_packed(made.packed, dtype=dtype)
    assert str(lm.dtype) == f"torch.{dtype}"
    layer = lm.get_submodule(Q)
    assert (layer.weight.dtype, layer.weight_scales.dtype) == (torch.int8, torch.float32)
    cast, x = from_packed(made.packed).to(lm.dtype), torch.linspace(-1, 1, 128).view(2, 64).to(lm.dtype)
    assert torch.equal(cast.get_submodule(Q)(x), layer(x))
    exact = logits(from_packed(made.packed, dtype="float32"))
    assert (logits(lm).float() - exact).norm() < 0.03 * exact.norm()
    assert torch.equal(logits(deepcopy(lm)), logits(lm))


# Damage.


@pytest.mark.parametrize(
    ("part", "edit"),
    [
        ("weight", lambda x: x + 1),
        ("weight_scales", lambda x: x * 2),
        ("weight_indices", lambda x: torch.full_like(x, 0b01_00_01_00)),
    ],
)
def test_changes_need_the_base_to_be_noticed(copy, made, part, edit):
    change(copy, f"{Q}.{part}", edit)
    reseal(copy)
    assert verify_packed(copy).ok
    assert failed(verify_packed(copy, made.source)) == {"survivors"}


def test_updates_without_a_mask_are_compared(made, tmp_path):
    names = [f"{Q}.weight", "model.norm.weight"]
    held = load_file(made.dense / "model.safetensors")
    new = {name: held[name] * 2 for name in names}
    hashes = {name: tensor_sha256(tensor) for name, tensor in new.items()}
    updated = MaskSet(made.masks.pattern, made.masks.layers, made.masks.base, hashes)
    dense = write_export(made.source, updated, tmp_path / "dense", updates=new)
    write_packed(dense, tmp_path / "packed", weights="int8")
    assert verify_packed(tmp_path / "packed", made.source).ok
    change(tmp_path / "packed", "model.norm.weight", lambda x: -x)
    reseal(tmp_path / "packed")
    assert failed(verify_packed(tmp_path / "packed", made.source)) == {"updates"}


# The other commands, and another library.


def test_torchao_s_int8_keeps_the_zeros(made):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = partial(quantization.Int8WeightOnlyConfig, version=2, set_inductor_config=False)
    lm = AutoModelForCausalLM.from_pretrained(made.dense, dtype=torch.float32)
    dense = {name: lm.get_parameter(name).detach().clone() for name in made.masks.layers}
    quantization.quantize_(lm, config())
    scales = PackedTensors(made.packed).packed(f"{Q}.weight").scales
    for name, mask in made.masks.layers.items():
        weight = lm.get_parameter(name)
        pruned = ~mask.to_bool()
        assert pruned.sum() * 2 == pruned.numel()
        assert not weight.qdata[pruned].any()
        assert not weight.dequantize()[pruned].any()
        assert ((weight.dequantize() - dense[name]).abs() <= weight.scale * 0.51).all()
    # Its steps are a little finer: they reach from -128 to 127.
    theirs = lm.get_parameter(f"{Q}.weight").scale.flatten()
    torch.testing.assert_close(theirs, scales * (127 / 127.5))
