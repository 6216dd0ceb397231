"""Files of earlier versions (`golden/make.py`): what is in them is known, and today's code must read and write it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from golden.make import HERE, PAIRS, masks
from helpers.lab import make_lab, run
from roi_lightning.contrib.packed import from_packed
from roi_lightning.masks.mask_set import MaskSet

lab = pytest.fixture(make_lab)


@pytest.fixture
def golden(tmp_path, monkeypatch):
    """A copy to work in: its files know the model as `model`."""
    folder = Path(shutil.copytree(HERE, tmp_path / "golden"))
    monkeypatch.chdir(folder)
    return folder


def plainly(path):
    """A mask file by its documented form alone: metadata, and the kept places of each layer."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata, kept = header.pop("__metadata__"), {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        bits = [byte >> bit & 1 for byte in data[start + first : start + end] for bit in range(8)]
        kept[name] = [place for place, bit in enumerate(bits) if bit]
    return metadata, kept


def rule(layer, shape):
    """The places that `golden/make.py` keeps, as plain numbers."""
    groups = shape[0] * shape[1] // 4
    return [4 * group + place for group in range(groups) for place in PAIRS[(group + layer) % 6]]


def same_masks(one, other):
    return one.layers.keys() == other.layers.keys() and all(
        torch.equal(one.layers[name].to_bool(), layer.to_bool()) for name, layer in other.layers.items()
    )


def test_the_mask_file_holds_what_was_put_in():
    metadata, kept = plainly(HERE / "mask.safetensors")
    shapes = {name: entry["shape"] for name, entry in json.loads(metadata["layers"]).items()}
    assert kept == {name: rule(i, shapes[name]) for i, name in enumerate(sorted(shapes))}
    assert len(kept) == 7
    named = ("format", "version", "n", "m", "bitorder", "dim", "base_model", "dtype")
    expected = ["roi_lightning.mask", "1", "2", "4", "lsb-first", "input", "model", "bfloat16"]
    assert [metadata[key] for key in named] == expected


def test_a_mask_file_is_read_and_written_as_before(golden, monkeypatch):
    loaded, made = MaskSet.load(Path("mask.safetensors")), masks()
    assert loaded.base == made.base
    assert same_masks(loaded, made)
    version = plainly(golden / "mask.safetensors")[0]["package_version"]
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    made.save(Path("again.safetensors"))
    assert Path("again.safetensors").read_bytes() == Path("mask.safetensors").read_bytes()


def test_an_export_verifies_and_is_made_again(golden):
    assert run("verify", "export", "--base", "model") == 0
    assert run("apply", "model", "mask.safetensors", "--out", "again") == 0
    weights, before = load_file("again/model.safetensors"), load_file("export/model.safetensors")
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_a_packed_directory_verifies_and_computes_the_same(golden):
    assert run("verify", "packed", "--base", "model") == 0
    ids = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained("export", dtype=torch.float32)(ids).logits
        packed = from_packed("packed", dtype="float32")(ids).logits
    torch.testing.assert_close(packed, dense, rtol=1e-5, atol=1e-5)


def test_int8_weights_are_as_documented(golden):
    """By the documented form alone: int8 times the row's scale, to half a step of what is stored otherwise."""
    assert run("verify", "packed_int8", "--base", "model") == 0
    now, before = (load_file(f"{name}/model.safetensors") for name in ("packed_int8", "packed"))
    scales = {name.replace("_scales", ""): now.pop(name) for name in list(now) if "scales" in name}
    assert len(scales) == 7
    assert now.keys() == before.keys()
    for name, tensor in before.items():
        if name in scales:
            assert (now[name].dtype, scales[name].dtype) == (torch.int8, torch.float32)
            off = (now[name].double() * scales[name].double()[:, None] - tensor.double()).abs()
            assert (off <= scales[name].double()[:, None] * 0.50001).all()
        else:
            assert torch.equal(now[name], tensor)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.isfinite(from_packed("packed_int8")(ids).logits).all()


def test_a_checkpoint_is_exported(lab, golden):
    # The configuration that is at hand, not the one that it was learned with.
    options = ["--ckpt_path", "run.ckpt", "--allow_changed_settings", "--out", "again"]
    assert run("export", *lab.quick(model="model"), *options) == 0
    assert same_masks(MaskSet.load(Path("again")), MaskSet.load(Path("mask.safetensors")))


def test_a_checkpoint_is_resumed(lab, golden):
    data = lab.data(tokenizer="model", corpora="text.jsonl")
    learner, trainer = lab.learn(2, model="model", data=data, ckpt_path="run.ckpt")
    assert trainer.global_step == 2
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {2}
    assert same_masks(learner.mask_set(), MaskSet.load(Path("mask.safetensors")))
