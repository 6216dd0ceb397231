import random

import pytest
import torch

from helpers.directories import flipped_bit
from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import BaseModel, MaskSet
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.utils.checksummed import read_checksummed, write_checksummed


def masks_of(bools, pattern="2:4", transposed=()):
    layers = {
        name: LayerMask.from_rows(mask.T if name in transposed else mask, name in transposed)
        for name, mask in bools.items()
    }
    base = BaseModel("some/model", "abc", "bfloat16", {name: f"hash of {name}" for name in bools})
    return MaskSet(NMPattern(pattern), layers, base)


def random_bools(seed, pattern="2:4"):
    generator = torch.Generator().manual_seed(seed)
    rule = NMPattern(pattern)
    shapes = {"b.0.q_proj.weight": (6, 20), "b.0.k_proj.weight": (5, 12), "b.1.q_proj.weight": (6, 20)}
    return {name: rule.top(torch.rand(shape, generator=generator)) for name, shape in shapes.items()}


@pytest.mark.parametrize("columns", [1, 3, 7, 8, 9, 12, 16, 20])
@pytest.mark.parametrize("transposed", [False, True])
def test_packing_round_trips(columns, transposed):
    mask = torch.rand(5, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    layer = LayerMask.from_rows(mask, transposed)
    assert layer.shape == (5, columns)
    assert layer.packed.shape == (5, -(-columns // 8))
    assert torch.equal(layer.to_bool(), mask.T if transposed else mask)
    for i in range(5):
        for j in range(columns):
            assert bool(layer.packed[i, j // 8] >> (j % 8) & 1) == bool(mask[i, j])


def test_overlap_is_that_of_the_unpacked_masks():
    first, second = random_bools(1), random_bools(2)
    overlap = masks_of(first).overlap(masks_of(second))
    for name in first:
        both = (first[name] & second[name]).sum().item()
        assert overlap.layers[name] == pytest.approx(both / first[name].sum().item())
    flat = [torch.cat([bools[name].flatten() for name in first]) for bools in (first, second)]
    assert overlap.all == pytest.approx(((flat[0] & flat[1]).sum() / flat[0].sum()).item())
    q = [torch.cat([bools[n].flatten() for n in first if "q_proj" in n]) for bools in (first, second)]
    assert overlap.kinds["q_proj"] == pytest.approx(((q[0] & q[1]).sum() / q[0].sum()).item())


def test_saving_round_trips_and_gives_the_same_bytes(tmp_path):
    bools = random_bools(0) | {"c.weight": random_bools(0)["b.0.k_proj.weight"].T.contiguous()}
    masks = masks_of(bools, transposed=["c.weight"])
    masks.save(tmp_path / "deep" / "mask.safetensors")
    loaded = MaskSet.load(tmp_path / "deep" / "mask.safetensors")
    assert (loaded.pattern, loaded.base) == (masks.pattern, masks.base)
    assert list(loaded.layers) == list(masks.layers)
    for name, mask in bools.items():
        assert torch.equal(loaded.layers[name].to_bool(), mask)
        assert loaded.layers[name].transposed == (name == "c.weight")
    loaded.save(tmp_path / "again.safetensors")
    first = (tmp_path / "deep" / "mask.safetensors").read_bytes()
    assert (tmp_path / "again.safetensors").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.safetensors", "deep"]


def test_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "m"
    masks_of(random_bools(0)).save(path)
    chance, every = random.Random(0), range(8 * path.stat().st_size)
    for bit in [*chance.sample(every, 400), *chance.sample(every[-8 * 300 :], 100), *range(64)]:
        with flipped_bit(path, bit), pytest.raises(UserError, match="mask file"):
            MaskSet.load(path)


@pytest.mark.parametrize("missing", ["version", "format", "layers", "n", "sha256"])
def test_a_header_without_an_entry_is_refused(tmp_path, missing):
    masks_of(random_bools(0)).save(tmp_path / "m")
    tensors, header = read_checksummed(tmp_path / "m")
    del header[missing]
    write_checksummed(tmp_path / "m", tensors, header)
    with pytest.raises(UserError, match="makes no sense"):
        MaskSet.load(tmp_path / "m")


def test_a_mask_that_breaks_its_pattern_is_never_saved(tmp_path):
    bools = random_bools(0)
    bools["b.0.k_proj.weight"][2, 4:8] = torch.tensor([True, True, True, False])
    with pytest.raises(UserError, match="k_proj"):
        masks_of(bools).save(tmp_path / "m")
    with pytest.raises(UserError, match="does not divide"):
        masks_of({"w": torch.ones(2, 6, dtype=torch.bool)}).save(tmp_path / "m")
    with pytest.raises(UserError, match="no layer"):
        masks_of({}).save(tmp_path / "m")
    assert not list(tmp_path.iterdir())
