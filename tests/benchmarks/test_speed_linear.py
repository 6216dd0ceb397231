"""`benchmarks.linear`: shapes and bytes against what can be counted, its pure functions against hand-made cases."""

import json
from itertools import cycle

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.linear import LinearTimes, faster_rows, main, together
from benchmarks.speed import products, timing
from benchmarks.speed.models import model_shapes, parse_shapes
from benchmarks.speed.products import ColdCacheLoop, Weights
from benchmarks.speed.timing import Speedup
from cli_helpers import plain_text
from roi_lightning.models.source import resolve_model
from tiny_models import tiny_gpt2, tiny_qwen2


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch):
    """As if caches held next to nothing, so that a few copies of tiny weights exceed them."""
    monkeypatch.setattr(timing, "_MIN_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "_TIMES_THE_CACHE", 0)


# Pure functions.


@pytest.mark.parametrize(
    ("ratios", "stretches"),
    [
        ({1: 1.5, 2: 1.2, 4: 0.9}, [(1, 2)]),
        ({1: 0.5, 2: 0.9, 4: 0.8}, []),
        ({4: 1.1, 1: 1.3, 2: 0.9, 256: 1.2, 512: 1.4, 16: 0.7}, [(1, 1), (4, 4), (256, 512)]),
        ({8: 1.0}, []),
    ],
)
def test_stretches_of_rows_in_which_packed_is_faster(ratios, stretches):
    assert faster_rows(ratios) == stretches


def test_the_choice_beside_the_fastest_kernel():
    times = {"dense": [0.5], "packed": [1.5], "a": [2.0], "b": [1.0], "c": [4.0]}
    of_packed, *others = LinearTimes("8x4", 1, 16, times, {"dense": 64, "packed": 36}, 10.0).speedups(
        torch.float32
    )
    assert (of_packed.name, of_packed.more["best"], of_packed.more["over_best"]) == (
        "linear.packed_over_dense",
        "b",
        1.5,
    )
    assert not any("best" in row.more for row in others)


def test_a_speedup_is_above_1_where_less_time_is_taken():
    row = Speedup("x", "2:4", [1.0, 3.0, 2.0], "dense", [8.0, 2.0, 4.0], {}).to_json()
    assert (row["ratio"], row["median_s"], row["reference_median_s"]) == (2.0, 2.0, 4.0)


def test_layers_together_take_the_sum_of_their_times():
    nbytes = {"dense": 64, "packed": 36}
    of_wide = {"dense": [1.0, 2.0], "packed": [0.5, 1.0], "kernel": [0.4, 0.4]}
    wide = LinearTimes("8x4", 2, 16, of_wide, nbytes, 10.0)
    tall = LinearTimes("4x8", 3, 16, {"dense": [10.0, 0.0], "packed": [1.0, 1.0]}, nbytes, 20.0)
    both = together([wide, tall])
    assert both.seconds == {"dense": [32.0, 4.0], "packed": [4.0, 5.0]}, "tall ones have no kernel"
    assert both.nbytes == {"dense": 5 * 64, "packed": 5 * 36}
    assert (both.shape, both.count, both.rows, both.bandwidth) == ("all", 5, 16, 15.0)


# Shapes.


def test_shapes_as_typed():
    assert parse_shapes("64x128,8x4") == {(64, 128): 1, (8, 4): 1}


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


# Products.


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


def test_walks_over_the_same_copies_take_turns(monkeypatch):
    monkeypatch.setattr(products, "_SECONDS", 0.0)
    taken, turn, x = [], cycle(range(5)), torch.ones(1, 4)
    ways = ([lambda x, way=way, i=i: taken.append((way, i)) for i in range(5)] for way in "ab")
    a, b = (ColdCacheLoop(products, x, turn) for products in ways)
    assert (a.steps, b.steps) == (1, 1)
    taken.clear()
    while next(turn) != 4:
        pass
    for task in (a, b, a, b, a, b):
        task()
    assert taken == [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 4), ("b", 0)]


# The command.


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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--shapes", "8x8", "--lm", "smollm2-135m"), "--lm LM or --shapes"),
        (("--shapes", "8x8,8x8"), "8x8,8x8"),
        (("--shapes", "8by8"), "8by8"),
        (("--shapes", "8x6"), "6 inputs"),
    ],
)
def test_shapes_that_are_none(args, says):
    with pytest.raises(SystemExit, match=f"error: .*{says}"):
        main(args)
