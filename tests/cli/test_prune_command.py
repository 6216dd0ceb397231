"""`prune` end to end on tiny models: what it writes, what it refuses, and that nothing half-written stays."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.directories import change, failed
from helpers.lab import make_lab, run
from helpers.refusals import tree
from helpers.tiny_models import tiny_gguf, tiny_gpt2, tiny_llama, tiny_qwen2
from roi_lightning.export import verify_export
from roi_lightning.masks.mask_set import MASK_FILE, MaskSet
from roi_lightning.models.source import resolve_model

lab = pytest.fixture(make_lab)


def prune(lab, out, *options, model=None, method="wanda"):
    text = ["--corpora", lab.corpus, "--windows", 3, "--seq_len", 32]
    return run("prune", model or lab.model, "--method", method, *text, "--out", out, *options)


def verified(directory, model):
    report = verify_export(directory, resolve_model(str(model)))
    assert report.ok, report.failures
    return {check.name: check.detail for check in report.checks}


@pytest.mark.parametrize(
    ("method", "pattern"), [("magnitude", "2:8"), ("wanda", "2:4"), ("sparsegpt", "4:8")]
)
def test_every_method_and_pattern_gives_a_directory_that_verifies(lab, tmp_path, method, pattern):
    out = tmp_path / "out"
    assert prune(lab, out, "--pattern", pattern, method=method) == 0
    verified(out, lab.model)
    masks = MaskSet.load(out)
    n, m = map(int, pattern.split(":"))
    assert masks.kept * m == masks.total * n
    exported = AutoModelForCausalLM.from_pretrained(out)
    weight = exported.model.layers[1].mlp.down_proj.weight.detach()
    assert ((weight.reshape(weight.shape[0], -1, m) != 0).sum(-1) == n).all()


@pytest.mark.parametrize("builder", [tiny_qwen2, tiny_llama, tiny_gpt2])
def test_sparsegpt_updates_kept_weights_and_says_so(lab, tmp_path, builder):
    model, out = builder(tmp_path / "m"), tmp_path / "out"
    assert prune(lab, out, model=model, method="sparsegpt") == 0
    checks = verified(out, model)
    masks = MaskSet.load(out)
    sidecar = json.loads((out / "roi_sparsity.json").read_text())
    assert sidecar["updated"] == list(masks.updated) == list(masks.layers)
    assert "updated survivors" in checks["updates"]
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        if name in masks.layers:
            kept = masks.layers[name].to_bool()
            assert not torch.equal(tensor[kept], before[name][kept])
        else:
            assert torch.equal(tensor, before[name])
    card = (out / "README.md").read_text()
    assert "adjusted to make up for the loss" in card
    assert "Nothing else was changed" not in card


def test_a_changed_update_does_not_verify(lab, tmp_path):
    out = tmp_path / "out"
    assert prune(lab, out, method="sparsegpt") == 0
    change(out, next(iter(MaskSet.load(out).updated)), lambda weight: 2 * weight)
    assert failed(verify_export(out, resolve_model(str(lab.model)))) == {"checksums", "updates"}


@pytest.mark.parametrize("mask", ["out", f"out/{MASK_FILE}"])
def test_apply_refuses_a_mask_whose_weights_were_updated(lab, tmp_path, capsys, mask):
    assert prune(lab, tmp_path / "out", method="sparsegpt") == 0
    assert run("apply", lab.model, tmp_path / mask, "--out", tmp_path / "again") == 1
    assert re.search(r"method updated in 14 tensors, .* use the directory", capsys.readouterr().err)
    assert not (tmp_path / "again").exists()


def test_a_gguf_model_is_pruned_and_saved(lab, tmp_path):
    file = tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    assert prune(lab, out, "--dtype", "float32", model=file, method="sparsegpt") == 0
    verified(out, file)
    assert load_file(out / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_runs_again_into_the_same_folder_with_the_same_result(lab, tmp_path, capsys):
    out = tmp_path / "out"
    contents = []
    for more in ([], ["--overwrite"]):
        assert prune(lab, out, *more, method="sparsegpt") == 0
        contents.append((out / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
    assert prune(lab, out, method="sparsegpt") == 1
    assert "--overwrite" in capsys.readouterr().err


def test_dense_activations_and_spilling_are_options(lab, tmp_path):
    assert prune(lab, tmp_path / "a") == 0
    assert prune(lab, tmp_path / "b", "--offload_dir", tmp_path / "offload_dir") == 0
    assert prune(lab, tmp_path / "c", "--activations", "dense") == 0
    masks = {name: MaskSet.load(tmp_path / name) for name in "abc"}
    assert masks["a"].overlap(masks["b"]).all == 1
    by_layer = masks["a"].overlap(masks["c"]).layers
    assert all(share == 1 for name, share in by_layer.items() if ".layers.0." in name)
    assert masks["a"].overlap(masks["c"]).all < 1


REFUSED = {
    "unknown method": (["--method", "wandda"], "method 'wandda' can't be made.*did you mean wanda"),
    "mask_only without sparsegpt": (["--mask_only"], "--mask_only is an option of sparsegpt"),
    "zero damping": (
        ["--method", "{class_path: SparseGPT, init_args: {damping: 0}}"],
        "damping 0.0 must be above 0",
    ),
    "pattern that does not divide": (["--pattern", "2:5"], "5 does not divide"),
    "no such layer": (["--ignore", "q_prog"], "ignore: 'q_prog' matches none"),
    "too little text": (["--windows", "4000"], r"holds \d+ windows of 32 tokens, 4000 are asked for"),
    "windows too long": (["--seq_len", "4096"], "reads at most 128"),
    "mapping with a wrong field": (["--corpora", "{source: x, colour: red}"], "colour"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_clear_line_and_leaves_nothing(lab, capsys, options, message):
    assert prune(lab, lab.folder / "results/out", *options) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert re.search(message, line)
    assert tree(lab.folder).keys() <= {"results"}


def test_an_update_that_the_stored_dtype_can_t_hold_is_refused(lab, tmp_path, capsys):
    assert prune(lab, tmp_path / "results/out", "--dtype", "float16", method="sparsegpt") == 1
    assert "stored as torch.bfloat16 and its update was made in torch.float16" in capsys.readouterr().err
    assert list((tmp_path / "results").iterdir()) == []
    assert prune(lab, tmp_path / "out", "--dtype", "float16", "--mask_only", method="sparsegpt") == 0


def test_an_update_made_in_a_wider_dtype_is_written_in_the_stored_one(lab, tmp_path):
    assert prune(lab, tmp_path / "out", "--dtype", "float32", method="sparsegpt") == 0
    assert run("verify", tmp_path / "out", "--base", lab.model) == 0
    weights = load_file(tmp_path / "out/model.safetensors").values()
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


def test_a_disk_without_room_for_the_updates_is_noticed_before_the_walk(lab, tmp_path, capsys, monkeypatch):
    room = (lab.model / "model.safetensors").stat().st_size * 1.9 + 2**20
    usage = SimpleNamespace(total=0, used=0, free=int(room))
    monkeypatch.setattr("roi_lightning.export.destination.shutil.disk_usage", lambda _: usage)
    assert prune(lab, tmp_path / "out", method="sparsegpt") == 1
    assert "are free" in capsys.readouterr().err
    assert prune(lab, tmp_path / "out", method="wanda") == 0


@pytest.mark.parametrize("block", [0, 1])
def test_a_walk_that_fails_leaves_nothing(lab, tmp_path, capsys, block):
    model = tiny_llama(tmp_path / "m")
    tensors = load_file(model / "model.safetensors")
    tensors[f"model.layers.{block}.post_attention_layernorm.weight"].fill_(
        3e38
    )  # times an input above 1: infinite
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert prune(lab, tmp_path / "results/out", model=model, method="sparsegpt") == 1
    assert f"layers.{block}.mlp.gate_proj met inputs that are infinite or NaN" in capsys.readouterr().err
    assert list((tmp_path / "results").iterdir()) == []
