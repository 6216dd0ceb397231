"""Packed directories: they unpack to what they were made of, compute the same, and hide no damage."""

import json
import random
import shutil
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.directories import ADDITIONS, TEMPLATE, add, change, export_of, failed, reseal, tensors_of
from helpers.lab import run
from helpers.tiny_models import (
    random_masks,
    tiny_gemma3,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mixtral,
    tiny_opt,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen3_moe,
)
from roi_lightning.contrib.packed import (
    PackedLinear,
    accelerate,
    from_packed,
    tensors,
    verify_packed,
    write_packed,
)
from roi_lightning.contrib.packed.tensors import PACKED, VERSION
from roi_lightning.errors import UserError
from roi_lightning.export import write_export
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import resolve_model
from roi_lightning.models.stored_tensors import tensor_sha256

ARCHITECTURES = {
    "llama": (tiny_llama, []),
    "qwen2": (tiny_qwen2, []),
    "qwen2, some layers dense": (tiny_qwen2, ["k_proj", "model.layers.1.*"]),
    "gemma3": (tiny_gemma3, []),
    "phi3": (tiny_phi3, []),
    "gpt2": (tiny_gpt2, []),
    "gpt2, no prefix": (partial(tiny_gpt2, prefix=False), []),
    "opt": (tiny_opt, []),
    "mixtral": (tiny_mixtral, []),
    "mixtral, some experts dense": (tiny_mixtral, ["w1", "experts.2.*"]),
    "qwen3_moe": (tiny_qwen3_moe, []),
    "gpt_oss": (tiny_gpt_oss, ["k_proj"]),
}
MIXTURES = {"mixtral", "mixtral, some experts dense", "qwen3_moe"}
Q = "model.layers.0.self_attn.q_proj"
NOTHING = {"quantization_config": None, "compression_config": None}


def logits(lm):
    ids = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        return lm(ids).logits


def pruned_and_packed(folder, architecture, weights):
    """A model pruned by magnitude, and the same packed."""
    build, dense_layers = ARCHITECTURES[architecture]
    ignore = ["--ignore", *dense_layers] if dense_layers else []
    base, dense, packed = build(folder / "base"), folder / "dense", folder / "packed"
    assert run("prune", base, "--method", "magnitude", *ignore, "--out", dense) == 0
    assert run("pack", dense, "--out", packed, "--weights", weights) == 0
    assert verify_packed(packed, resolve_model(str(base))).ok
    return dense, packed


@pytest.mark.filterwarnings("ignore:.*matrices of a layout that is not known")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_dense_directory(tmp_path, architecture):
    dense, packed = pruned_and_packed(tmp_path, architecture, "stored")
    lm = from_packed(packed)
    wanted = AutoModelForCausalLM.from_pretrained(dense, dtype=lm.dtype)
    assert type(lm) is type(wanted)
    assert not lm.training
    assert sum(isinstance(module, PackedLinear) for module in lm.modules()) == len(MaskSet.load(dense).layers)
    torch.testing.assert_close(logits(lm), logits(wanted))
    rounding = 1e-6 if architecture in MIXTURES else 0.0
    torch.testing.assert_close(logits(deepcopy(lm).dequantize()), logits(wanted), rtol=0, atol=rounding)
    accelerate(wanted)
    assert torch.equal(logits(lm), logits(wanted))
    tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert tied == bool(wanted.config.tie_word_embeddings)
    assert {lm.dtype} == {p.dtype for p in wanted.parameters()}


# One packed directory that is only read, or copied and spoiled.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    base = tiny_llama(folder / "base", max_shard_size="150KB")
    (base / "LICENSE").write_text("do as you like")
    (base / "generation_config.json").write_text('{"max_new_tokens": 3, "eos_token_id": 256}')
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | NOTHING))
    source, masks, dense = export_of(base, training={"steps": 7})
    write_packed(dense, folder / "packed")
    return SimpleNamespace(source=source, masks=masks, dense=dense, packed=folder / "packed", folder=folder)


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made.packed, tmp_path / "copy")


def test_kept_weights_and_indices_stand_for_masked_tensors(made):
    stored, dense = tensors_of(made.packed), AutoModelForCausalLM.from_pretrained(made.dense).state_dict()
    for name, layer in made.masks.layers.items():
        assert torch.equal(stored[name].flatten(), dense[name][layer.to_bool()])
        assert stored[f"{name}_indices"].dtype == torch.uint8
    assert len(stored) == len(dense) + len(made.masks.layers)


def test_companions_come_along_and_the_configuration_says_what_is_packed(made):
    names = {path.name for path in made.packed.iterdir()}
    assert "roi_mask.safetensors" not in names
    for name in ("LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (made.packed / name).read_bytes() == (made.dense / name).read_bytes()
    config = json.loads((made.packed / "config.json").read_text())
    quantized = config.pop("quantization_config")
    assert config.pop("transformers_weights") == "import roi_lightning.contrib.packed"
    assert config | NOTHING == json.loads((made.dense / "config.json").read_text())
    method = {"quant_method": "roi_lightning.packed", "version": 4}
    assert quantized == method | {"weights": "stored", "layers": list(made.masks.layers)}
    assert {path.name for path in made.packed.glob("model*")} == {
        path.name for path in made.dense.glob("model*")
    }
    sidecar = read_sidecar(made.packed, PACKED, VERSION)
    assert sidecar["training"] == {"steps": 7}
    assert set(sidecar["files"]) == names - {"roi_sparsity.json"}
    assert str(made.folder) not in (made.packed / "README.md").read_text()


# What transformers makes of it.


@pytest.mark.parametrize(
    ("name", "weights"),
    [("llama", "int8"), ("gpt2, no prefix", "stored"), ("mixtral, some experts dense", "stored")],
)
def test_transformers_saves_it_again(tmp_path, name, weights):
    _, packed = pruned_and_packed(tmp_path, name, weights)
    lm = AutoModelForCausalLM.from_pretrained(packed)
    lm.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    lm.save_pretrained(tmp_path / "again", max_shard_size="100KB")  # saving uses nothing up
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(lm))
    mine, its = again.state_dict(), lm.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[key], its[key]) for key in mine)
    with pytest.raises(UserError, match=r"roi_sparsity\.json can't be read"):
        from_packed(tmp_path / "again")  # nobody knows its hashes


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_unpacked_it_is_an_ordinary_model_as_on_gpus(made, tmp_path, weights, caplog):
    write_packed(made.dense, tmp_path / "packed", weights=weights)
    packed, plain = (from_packed(tmp_path / "packed", dtype="float32") for _ in range(2))
    plain.dequantize()
    assert "is unpacked: packed layers are fast on CPUs alone" in caplog.text
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())
    ids = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, packed(ids).logits, rtol=1e-4, atol=1e-5)
        assert plain.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 28)
    plain.save_pretrained(tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, plain(ids).logits)


def test_the_card_s_snippet_runs(made, monkeypatch):
    card = (made.packed / "README.md").read_text()
    snippet = card.split("```python\n")[1].split("```")[0]
    names = {}
    exec(snippet.replace("PATH", str(made.packed)), names)
    wanted = AutoTokenizer.from_pretrained(made.dense)
    assert type(names["tokenizer"]) is type(wanted)
    ids = names["tokenizer"]("once upon", return_tensors="pt").input_ids
    assert torch.equal(ids, wanted("once upon", return_tensors="pt").input_ids)
    assert names["model"](ids).logits.shape[-1] == 264


# Damage.


def spoil(good):
    """Ways to spoil a file's bytes."""
    place = random.Random(len(good))
    for _ in range(6):
        bad = bytearray(good)
        bad[place.randrange(len(good))] ^= 1 << place.randrange(8)
        yield "a flipped bit", bytes(bad)
    yield "the first byte", bytes([good[0] ^ 1]) + good[1:]
    yield "the last byte", good[:-1] + bytes([good[-1] ^ 1])
    yield "cut at the end", good[:-1]
    yield "cut in half", good[: len(good) // 2]
    yield "nothing left", b""
    yield "a byte too many", good + b"\n"


def test_damage_to_any_file_is_noticed_when_it_is_loaded(copy):
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert len(files) > 8
    for file in files:
        good = file.read_bytes()
        for name, bad in spoil(good):
            file.write_bytes(bad)
            with pytest.raises(UserError, match=r"copy") as caught:
                from_packed(copy)
            assert file.name in str(caught.value), (name, file.name)
        file.unlink()
        with pytest.raises(UserError, match=r"is missing|can't be read|has no config.json"):
            from_packed(copy)
        assert not verify_packed(copy).ok, file.name
        file.write_bytes(good)
    assert torch.isfinite(logits(from_packed(copy))).all()


# verify.


def test_an_untouched_directory_verifies(made, capsys):
    assert run("verify", made.packed, "--base", made.source.path) == 0
    assert "all 10 checks hold" in capsys.readouterr().out
    assert run("verify", made.packed) == 0
    assert "all 5 checks hold" in capsys.readouterr().out


@pytest.mark.parametrize("what", ADDITIONS)
def test_what_was_added_and_hashed_is_noticed(copy, made, what):
    add(copy, what)
    reseal(copy)
    assert ("files" in failed(verify_packed(copy))) == (what != TEMPLATE)
    assert failed(verify_packed(copy, made.source)) & {"files", "copied files"}


def test_indices_that_no_packing_makes_are_noticed(copy):
    change(copy, f"{Q}.weight_indices", torch.zeros_like)
    reseal(copy)
    assert failed(verify_packed(copy)) == {"indices"}


def test_moved_indices_need_the_base_to_be_noticed(copy, made):
    change(copy, f"{Q}.weight_indices", lambda x: torch.full_like(x, 0b01_00_01_00))
    reseal(copy)
    assert not failed(verify_packed(copy))
    assert failed(verify_packed(copy, made.source)) == {"survivors"}


@pytest.mark.parametrize("entry", [{"weights": "int8"}, {"layers": []}, {"quant_method": "other"}])
def test_a_configuration_that_contradicts_the_sidecar_is_noticed(copy, entry):
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] |= entry
    (copy / "config.json").write_text(json.dumps(config))
    reseal(copy)
    assert failed(verify_packed(copy)) == {"configuration"}


def test_another_base_is_noticed(made, tmp_path):
    other = resolve_model(str(tiny_llama(tmp_path / "other", seed=1)))
    assert {"base hashes", "survivors", "other tensors"} <= failed(verify_packed(made.packed, other))
    opt = resolve_model(str(tiny_opt(tmp_path / "opt")))
    assert "same tensors" in failed(verify_packed(made.packed, opt))


def test_updated_weights_are_packed_and_hashed(tmp_path):
    source = resolve_model(str(tiny_qwen2(tmp_path / "base")))
    masks = random_masks(source)
    name, layer = next(iter(masks.layers.items()))
    new = torch.randn(layer.shape, generator=torch.Generator().manual_seed(0))
    new = new.to(torch.bfloat16).masked_fill(~layer.to_bool(), 0)
    updated = MaskSet(masks.pattern, masks.layers, masks.base, {name: tensor_sha256(new)})
    dense = write_export(source, updated, tmp_path / "dense", updates={name: new})
    packed = tmp_path / "packed"
    write_packed(dense, packed)
    assert len(verify_packed(packed, source).checks) == 11
    assert verify_packed(packed, source).ok
    assert torch.equal(from_packed(packed).dequantize().get_parameter(name), new)
    change(packed, name, lambda x: -x)
    reseal(packed)
    assert failed(verify_packed(packed, source)) == {"updates"}


def test_kept_zeros_keep_their_indices(tmp_path):
    base = tiny_qwen2(tmp_path / "base")
    change(base, "model.layers.0.mlp.up_proj.weight", lambda x: x.fill_(-0.0))
    source, _, dense = export_of(base)
    write_packed(dense, tmp_path / "packed")
    assert verify_packed(tmp_path / "packed", source).ok


# Writing.


@pytest.mark.parametrize(("weights", "step"), [("stored", "pack"), ("int8", "quantize")])
def test_what_does_not_come_out_as_it_went_in_is_not_kept(made, tmp_path, monkeypatch, weights, step):
    """In int8 what is more than half a step off."""

    def careless(*args):
        packed = rightly(*args)
        packed.values[0, 0] -= packed.values[0, 0].sign()
        return packed

    rightly = getattr(tensors, step)
    monkeypatch.setattr(tensors, step, careless)
    with pytest.raises(UserError, match="does not come out"):
        write_packed(made.dense, tmp_path / "out", weights=weights)
    assert not list(tmp_path.iterdir())


# The other commands.


def test_it_is_evaluated_like_the_dense_directory(made, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("A text of some length, so that it fills more than two windows. " * 9)
    options = ["--text", text, "--seq_len", "32", "--limit", "2", "--json", out]
    assert run("evaluate", made.dense, made.packed, *options) == 0
    dense, packed = json.loads(out.read_text())["models"].values()
    assert packed == pytest.approx(dense, rel=1e-6)
