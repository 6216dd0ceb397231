"""`benchmarks.linear`: shapes and bytes against what can be counted, products against double precision."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.linear import main
from benchmarks.speed import timing
from benchmarks.speed.models import model_shapes
from benchmarks.speed.products import Weights
from helpers.lab import plain_text
from helpers.tiny_models import tiny_gpt2, tiny_qwen2
from roi_lightning.models.source import resolve_model


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch):
    """As if caches held next to nothing, so that a few copies of tiny weights exceed them."""
    monkeypatch.setattr(timing, "_MIN_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "_TIMES_THE_CACHE", 0)


@pytest.mark.parametrize(("build", "blocks"), [(tiny_qwen2, "model.layers."), (tiny_gpt2, "transformer.h.")])
def test_shapes_of_a_model_are_those_on_disk(tmp_path, build, blocks):
    model = build(tmp_path / "model")
    found = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.startswith(blocks) and tensor.ndim == 2:
            shape = tuple(tensor.T.shape if "c_" in name else tensor.shape)
            found[shape] = found.get(shape, 0) + 1
    (model / "model.safetensors").unlink()
    assert model_shapes(resolve_model(str(model))) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_multiplies_by_every_copy_of_the_same_weight(dtype):
    weights = Weights((12, 16), dtype, min_bytes=5 * 12 * 16 * dtype.itemsize - 1)
    x = torch.randn(3, 16).to(dtype)
    ways = weights.products(x)
    weight = ways["dense"][0].keywords["weight"]
    assert ((weight.view(12, 4, 4) != 0).sum(-1) == 2).all()
    exact = F.linear(x.double(), weight.double())
    assert {"packed", "unpacked"} < set(ways)
    for copies in ways.values():
        assert len(copies) == 5
        for product in copies:
            torch.testing.assert_close(product(x).double(), exact, rtol=0.01, atol=0.01)
    copies = [product.keywords["weight"].data_ptr() for product in ways["dense"]]
    assert len(set(copies)) == 5, "else a cache would hold them"


def test_rows_of_a_model(tmp_path, capsys):
    model = tiny_qwen2(tmp_path / "model")
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    options = ("--rows", "1,3", "--rounds", "2", "--json", str(out), "--figure", str(picture))
    main(["--lm", str(model), *options])
    rows = json.loads(out.read_text())["rows"]
    shapes = {"64x64": 4, "32x64": 4, "128x64": 4, "64x128": 2, "all": 14}
    packed = {(row["shape"], row["rows"]): row for row in rows if row["name"] == "linear.packed_over_dense"}
    assert set(packed) == {(shape, rows) for shape in shapes for rows in (1, 3)}
    prunable = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    for (shape, _), row in packed.items():
        size = prunable if shape == "all" else int(shape.split("x")[0]) * int(shape.split("x")[1])
        assert row["layers"] == shapes[shape]
        assert row["reference_bytes"] == 2 * size
        assert row["bytes"] == 2 * size * 9 / 16
        assert (row["pattern"], row["reference"], row["dtype"]) == ("2:4", "dense", "bfloat16")
    with Image.open(picture) as image:
        assert image.format == "PNG"
    assert "14 × all" in plain_text(capsys.readouterr().out)
