import json
import shutil
from itertools import product

import pytest
import torch

from helpers.directories import ADDITIONS, TEMPLATE, add, change, export_of, failed, flipped_bit, reseal
from helpers.lab import run
from helpers.tiny_models import random_masks, tiny_gguf, tiny_llama, tiny_qwen2
from roi_lightning.errors import UserError
from roi_lightning.export import verify_export, write_export
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.models.source import resolve_model


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    base = tiny_llama(tmp_path_factory.mktemp("export") / "base", max_shard_size="150KB")
    (base / "LICENSE").write_text("do as you like")
    return export_of(base, training={"steps": 7, "rate": 1e-5})[2]


@pytest.fixture
def export(original, tmp_path):
    return shutil.copytree(original, tmp_path / "out")


def base_of(original):
    return resolve_model(str(original.parent / "base"))


def test_an_untouched_export_verifies(original):
    assert verify_export(original).ok
    report = verify_export(original, base_of(original))
    assert report.ok
    assert len(report.checks) == 11


def test_a_flipped_bit_in_any_file_is_noticed(export):
    files = [path for path in export.rglob("*") if path.is_file()]
    assert len(files) > 8
    for file in files:
        size = file.stat().st_size
        for where, bit in product((0, size // 3, size // 2, size - 1), (0, 5)):
            with flipped_bit(file, 8 * where + bit):
                assert not verify_export(export).ok, f"bit {bit} of byte {where} of {file.name}"
    assert verify_export(export).ok


def test_every_bit_of_the_sidecar_counts(export):
    file = export / "roi_sparsity.json"
    for where in range(0, file.stat().st_size, 3):
        with flipped_bit(file, 8 * where + where % 8), pytest.raises(UserError):
            read_sidecar(export)


def test_missing_and_extra_files_are_noticed(export):
    (export / "tokenizer.json").rename(export / "token.json")
    report = {check.name: check.detail for check in verify_export(export).failures}
    assert "tokenizer.json" in report["files"]
    (export / "token.json").rename(export / "tokenizer.json")
    (export / "folder").mkdir()
    (export / "folder" / "hidden").write_text("")
    assert failed(verify_export(export)) == {"files"}


@pytest.mark.parametrize("what", ADDITIONS)
def test_what_was_added_and_hashed_is_noticed(export, original, what):
    add(export, what)
    reseal(export)
    assert ("files" in failed(verify_export(export))) == (what != TEMPLATE)
    assert failed(verify_export(export, base_of(original))) & {"files", "copied files"}


@pytest.mark.parametrize(
    "file", ["roi_sparsity.json", "roi_mask.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_a_missing_file_fails_and_does_not_crash(export, original, file):
    (export / file).unlink()
    assert "files" in failed(verify_export(export, base_of(original))) or file == "roi_sparsity.json"
    assert not verify_export(export).ok


def test_zeros_must_be_plus_zero_where_the_mask_says(export):
    name = next(iter(read_sidecar(export)["layers"]))
    change(export, name, lambda weight: torch.where(weight == 0, -0.0, weight))
    reseal(export)
    assert failed(verify_export(export)) == {"zeros"}


def test_a_kept_zero_is_no_fault(tmp_path):
    base = tiny_qwen2(tmp_path / "base")
    change(base, "model.layers.0.mlp.up_proj.weight", torch.zeros_like)
    source, _, out = export_of(base)
    assert verify_export(out, source).ok


def test_changed_kept_weights_need_the_base_to_be_noticed(export, original):
    name = next(iter(read_sidecar(export)["layers"]))
    change(export, name, lambda weight: weight * 2)
    reseal(export)
    assert verify_export(export).ok
    assert failed(verify_export(export, base_of(original))) == {"survivors"}


def test_other_changes_need_the_base_to_be_noticed(export, original):
    change(export, "model.norm.weight", lambda weight: weight + 1)
    (export / "LICENSE").write_text("do as I say")
    reseal(export)
    assert verify_export(export).ok
    assert failed(verify_export(export, base_of(original))) == {"other tensors", "copied files"}


def test_another_base_is_noticed(original, tmp_path):
    other = resolve_model(str(tiny_llama(tmp_path / "other", seed=1, max_shard_size="150KB")))
    assert {"base hashes", "survivors", "other tensors"} <= failed(verify_export(original, other))


@pytest.mark.parametrize(
    "entry", [{"quantization_config": {}}, {"compression_config": {}}, {"transformers_weights": "nowhere"}]
)
def test_entries_of_compression_and_other_files_are_noticed(export, entry):
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | entry))
    reseal(export)
    assert failed(verify_export(export)) == {"config"}


@pytest.mark.parametrize(("key", "value"), [("zero_fraction", 0.4), ("pattern", "1:4"), ("updated", ["x"])])
def test_a_sidecar_that_says_other_things_than_the_mask_file_is_noticed(export, key, value):
    reseal(export, **{key: value})
    assert failed(verify_export(export)) == {"mask"}


def test_the_verify_command(export, original, capsys):
    base = str(original.parent / "base")
    report = export.parent / "report.json"
    assert run("verify", str(export), "--base", base, "--json", str(report)) == 0
    assert "all 11 checks hold" in capsys.readouterr().out
    assert json.loads(report.read_text())["ok"] is True
    (export / "LICENSE").write_text("x")
    assert run("verify", str(export), "--json", str(report)) == 1
    assert "1 of 6 checks failed" in capsys.readouterr().out
    rows = json.loads(report.read_text())["checks"]
    assert [row["name"] for row in rows if not row["ok"]] == ["checksums"]
    assert run("verify", export / "absent") == 1
    assert "no directory" in capsys.readouterr().err


def test_apply_makes_the_same_directory(original, tmp_path, capsys):
    base, mask = str(original.parent / "base"), str(original / "roi_mask.safetensors")
    assert run("apply", base, mask, "--out", str(tmp_path / "out")) == 0
    assert "verified" in capsys.readouterr().out
    names = {path.name for path in original.iterdir()}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    for name in names - {"README.md", "roi_sparsity.json"}:
        assert (original / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    plain = write_export(base_of(original), random_masks(base_of(original)), tmp_path / "plain")
    for name in names:
        assert (plain / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_apply_to_a_gguf_base(tmp_path, capsys):
    source, _, out = export_of(tiny_gguf(tmp_path / "base.gguf"), dtype="float16")
    gguf = source.spec
    assert run("apply", gguf, str(out), "--out", str(tmp_path / "again")) == 0
    for file in out.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    assert run("verify", str(out), "--base", gguf) == 0
    add(out, TEMPLATE)
    reseal(out)
    assert failed(verify_export(out, source)) == {"copied files"}
    assert run("apply", gguf, out, "--out", tmp_path / "other", "--dtype", "float32") == 1
    assert "other values" in capsys.readouterr().err
