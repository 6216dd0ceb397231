"""`compare`: the overlap of masks, as a table, as JSON, and in a figure."""

import json
import re
import shutil

import pytest
from PIL import Image

from helpers.mask_sets import QWEN, mask_set, names_of
from helpers.tiny_models import random_masks, tiny_gpt2, tiny_qwen2
from roi_lightning.__main__ import main
from roi_lightning.cli import compare
from roi_lightning.errors import UserError
from roi_lightning.evaluation.evaluated_models import resolve_evaluated
from roi_lightning.export import write_export
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.source import resolve_model


@pytest.fixture
def files(tmp_path):
    """Three mask files of one model."""
    for i, name in enumerate(("magnitude", "wanda", "roi")):
        mask_set(i).save(tmp_path / f"{name}.safetensors")
    return [str(tmp_path / f"{name}.safetensors") for name in ("magnitude", "wanda", "roi")]


def run(*arguments):
    return main(["compare", *map(str, arguments)])


def test_the_command_writes_a_table_and_a_picture(files, tmp_path, capsys):
    out, extra = tmp_path / "deep" / "out", tmp_path / "extra.json"
    assert run(*files, "--out", out, "--json", extra) == 0
    assert {path.name for path in out.iterdir()} == {"overlap.json", "masks.png"}
    result = json.loads((out / "overlap.json").read_text())
    assert extra.read_bytes() == (out / "overlap.json").read_bytes()
    assert result["pattern"] == "2:4"
    assert result["masks"] == dict(zip(("magnitude", "wanda", "roi"), files, strict=True))
    assert [(row["a"], row["b"]) for row in result["overlap"]] == [
        ("magnitude", "wanda"),
        ("magnitude", "roi"),
        ("wanda", "roi"),
    ]
    overlap = mask_set(1).overlap(mask_set(2))
    row = {"a": "wanda", "b": "roi", "all": overlap.all, "kinds": overlap.kinds, "layers": overlap.layers}
    assert result["overlap"][2] == row
    printed = capsys.readouterr()
    assert not printed.err
    shares = [overlap.all, *overlap.kinds.values()]
    assert re.search(r"wanda – roi +" + " +".join(f"{100 * x:.1f}" for x in shares), printed.out)
    assert "50.0 by chance" in printed.out
    with Image.open(out / "masks.png") as image:
        image.load()
        assert all(600 < side < 4000 for side in image.size)


def test_a_run_s_folder_stands_for_its_export(tmp_path, capsys):
    source, applied = resolve_model(str(tiny_qwen2(tmp_path / "base"))), tmp_path / "applied"
    exports = [tmp_path / name / "export" for name in ("run1", "run2")]
    for seed, export in enumerate(exports):
        write_export(source, random_masks(source, seed=seed), export)
    one, other = (str(export.parent) for export in exports)
    assert run(one, other, "--out", tmp_path / "out") == 0
    assert "run1 – run2" in capsys.readouterr().out
    assert main(["apply", source.spec, one, "--out", str(applied)]) == 0
    assert MaskSet.load(applied).overlap(MaskSet.load(exports[0])).all == 1
    assert resolve_evaluated([one], None)[0].source.directory == exports[0]
    assert main(["verify", one, "--base", source.spec]) == 0
    assert f"{exports[0]}: all" in capsys.readouterr().out


@pytest.mark.parametrize("build", [tiny_qwen2, tiny_gpt2])
def test_files_and_exported_directories_of_a_model(build, tmp_path, capsys):
    source = resolve_model(str(build(tmp_path / "base")))
    exported = write_export(source, random_masks(source, seed=1), tmp_path / "wanda")
    random_masks(source, seed=2).save(tmp_path / "roi" / "roi_mask.safetensors")
    shutil.copytree(exported, tmp_path / "copy")
    arguments = [exported, f"copy={tmp_path / 'copy'}", tmp_path / "roi" / "roi_mask.safetensors"]
    capsys.readouterr()
    assert run(*arguments, "--out", tmp_path / "out") == 0
    result = json.loads((tmp_path / "out" / "overlap.json").read_text())
    assert list(result["masks"]) == ["wanda", "copy", "roi"]
    assert result["overlap"][0]["all"] == 1
    expected = random_masks(source, seed=1).overlap(random_masks(source, seed=2))
    assert result["overlap"][1]["layers"] == result["overlap"][2]["layers"] == expected.layers
    assert not capsys.readouterr().err


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a/export", "b/export", "x=y"):
        (tmp_path / folder).mkdir(parents=True)
    label = compare.name_masks
    assert label(["a/export", "b/m.safetensors"]) == {"export": "a/export", "m": "b/m.safetensors"}
    assert label(["a/export", "b/export", "c/roi_mask.safetensors"]) == {
        "a/export": "a/export",
        "b/export": "b/export",
        "c": "c/roi_mask.safetensors",
    }
    assert label(["x=y", "x=z", "./a=b"]) == {"x=y": "x=y", "x": "z", "a=b": "./a=b"}
    with pytest.raises(UserError, match="two masks are called 'n'"):
        label(["n=a", "n=b"])
    with pytest.raises(UserError, match="two masks are called 'a/export'"):
        label(["a/export", "a/export"])


def test_masks_of_another_base_are_compared_with_a_warning(files, tmp_path, capsys):
    mask_set(5, base="other/model").save(tmp_path / "other.safetensors")
    assert run(files[0], tmp_path / "other.safetensors", "--out", tmp_path / "out") == 0
    assert "warning: masks of different base models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (mask_set(0, "4:8"), "different patterns"),
        (mask_set(0, shapes=names_of(QWEN, 3, "model.layers")), "different models"),
        (mask_set(0, shapes=names_of(QWEN | {"mlp.up_proj": (24, 32)}, 4, "model.layers")), r"mlp\.up_proj"),
    ],
    ids=["pattern", "layers", "shapes"],
)
def test_what_can_not_be_compared_is_refused_and_nothing_is_written(files, tmp_path, other, reason, capsys):
    other.save(tmp_path / "other.safetensors")
    assert run(*files, tmp_path / "other.safetensors", "--out", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert re.search(reason, error)
    assert "'other'" in error
    assert not (tmp_path / "out").exists()


def test_bad_command_lines(files, tmp_path, capsys):
    assert run(files[0], "--out", tmp_path / "out") == 1
    assert "is one mask; give two or more: compare MASK MASK --out DIR" in capsys.readouterr().err
    assert run(files[0], tmp_path / "absent", "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert run(*files, "--out", files[0]) == 1
    assert "can't be written" in capsys.readouterr().err
    assert run(*files, "--out", tmp_path / "out", "--json", tmp_path) == 1
    assert not (tmp_path / "out").exists()
