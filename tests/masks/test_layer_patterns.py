"""Mixed patterns: which layer has which, the mask file of such a set, and what is refused."""

import json

import pytest
import torch
from safetensors import safe_open

from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import LayerPatterns, is_mixed, layer_patterns, mixed_pattern
from roi_lightning.masks.mask_set import BaseModel, MaskSet
from roi_lightning.masks.pattern import NMPattern

TWO, FOUR, ONE = NMPattern("2:4"), NMPattern("4:8"), NMPattern("1:4")
SHAPES = {"b.0.q_proj.weight": (6, 24), "b.0.down_proj.weight": (5, 16), "b.1.q_proj.weight": (6, 24)}
PATTERNS = {"b.0.q_proj.weight": TWO, "b.0.down_proj.weight": FOUR, "b.1.q_proj.weight": ONE}
DENSE = {"b.1.down_proj.weight": 80}


def mixed_masks(seed=0, patterns=PATTERNS, dense=DENSE):
    generator = torch.Generator().manual_seed(seed)
    bools = {name: patterns[name].top(torch.rand(SHAPES[name], generator=generator)) for name in patterns}
    layers = {name: LayerMask.from_rows(mask) for name, mask in bools.items()}
    base = BaseModel("some/model", None, "float32", {name: f"hash of {name}" for name in layers})
    return MaskSet(layer_patterns(patterns | dict.fromkeys(dense)), layers, base, dense=dense)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"q_proj": "4:8"}, {"b.0.q_proj": FOUR, "b.0.o_proj": TWO, "b.1.q_proj": FOUR}),
        ({"*.q_proj": "4:8", "b.0.*": "1:4"}, {"b.0.q_proj": ONE, "b.0.o_proj": ONE, "b.1.q_proj": FOUR}),
        # A full name wins, wherever it stands.
        (
            {"b.0.q_proj": "1:4", "q_proj": "dense"},
            {"b.0.q_proj": ONE, "b.1.q_proj": None, "b.0.o_proj": TWO},
        ),
        # What YAML 1.1 makes of an unquoted 4:8, and a rule for all that comes after another.
        ({"q_proj": "dense", "*": 4 * 60 + 8}, {"b.0.q_proj": FOUR, "b.0.o_proj": FOUR}),
    ],
)
def test_each_layer_has_the_pattern_that_the_rule_says(patterns, expected):
    mixed = mixed_pattern(TWO, patterns)
    assert {name: mixed.find(name) for name in expected} == expected


def test_the_label_names_every_pattern_once_the_sparsest_first():
    mixed = LayerPatterns({"a": None, "b": FOUR, "c": TWO, "d": ONE, "e": FOUR})
    assert str(mixed) == "1:4 + 2:4 + 4:8 + dense"
    assert [is_mixed(text) for text in (str(mixed), "2:4 + dense", "2:4")] == [True, True, False]


@pytest.mark.parametrize("value", ["half", "4:2", 7, None, ["2:4"]])
def test_a_pattern_that_can_not_be_read_is_named_with_its_glob(value):
    with pytest.raises(UserError, match=r"patterns, '\*\.k_proj': pattern .*, or dense$"):
        mixed_pattern(TWO, {"*.k_proj": value})


def test_a_mixed_mask_file_round_trips_and_says_what_it_is(tmp_path):
    masks = mixed_masks()
    masks.save(tmp_path / "m")
    loaded = MaskSet.load(tmp_path / "m")
    assert (loaded.pattern, loaded.dense, loaded.base) == (masks.pattern, masks.dense, masks.base)
    assert all(torch.equal(x.packed, loaded.layers[name].packed) for name, x in masks.layers.items())
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()
    with safe_open(tmp_path / "m", framework="pt") as file:
        header = file.metadata()
    # Readers of version 1 refuse it, which has one N and M.
    assert header["version"] == "2"
    assert "n" not in header
    assert "m" not in header
    patterns = {name: entry["pattern"] for name, entry in json.loads(header["layers"]).items()}
    assert patterns == {name: str(pattern) for name, pattern in PATTERNS.items()}
    assert json.loads(header["dense"]) == DENSE


def test_counts_take_in_what_is_left_dense():
    masks = mixed_masks()
    kept = 6 * 24 // 2 + 5 * 16 // 2 + 6 * 24 // 4
    assert (masks.kept, masks.total, masks.is_mixed) == (kept, 6 * 24 + 5 * 16 + 6 * 24, True)
    share = (kept + 80) / (masks.total + 80)
    assert masks.amount == f"{kept + 80} of {masks.total + 80} ({share:.1%}, mixed patterns)"


def test_groups_are_checked_by_their_own_pattern(tmp_path):
    masks = mixed_masks()
    # Half of every eight, but not of every four: 4:8 and not 2:4.
    uneven = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool).repeat(5, 2)
    masks.layers["b.0.down_proj.weight"] = LayerMask.from_rows(uneven)
    masks.check()
    masks.layers["b.0.q_proj.weight"] = LayerMask.from_rows(uneven[:, :8].repeat(1, 3)[:, :24].expand(5, 24))
    with pytest.raises(UserError, match=r"b\.0\.q_proj.* exactly 2:4"):
        masks.save(tmp_path / "m")
    mixed = mixed_masks()
    unsized = MaskSet(mixed.pattern, mixed.layers, mixed.base)
    with pytest.raises(UserError, match="those left dense"):
        unsized.check()


def test_masks_are_compared_only_where_their_patterns_are_the_same():
    one, other = mixed_masks(0), mixed_masks(1)
    overlap = one.overlap(other)
    both = {name: (x.to_bool() & other.layers[name].to_bool()).sum() for name, x in one.layers.items()}
    assert overlap.all == pytest.approx(float(sum(both.values())) / one.kept)
    moved = mixed_masks(patterns=PATTERNS | {"b.0.q_proj.weight": ONE, "b.1.q_proj.weight": TWO})
    assert str(moved.pattern) == str(one.pattern)
    for different in (
        moved,
        mixed_masks(dense={}),
        mixed_masks(patterns=dict.fromkeys(SHAPES, TWO), dense={}),
    ):
        with pytest.raises(UserError, match="masks of different patterns can't be compared"):
            one.overlap(different)
