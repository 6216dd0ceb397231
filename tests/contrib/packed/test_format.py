"""2:4 matrices in fewer bytes, and back."""

from itertools import combinations

import pytest
import torch

from roi_lightning.contrib.packed import Packed, pack, unpack
from roi_lightning.contrib.packed.format import check_indices, is_near, quantize
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern


def sparse(rows, columns, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    return weight.masked_fill(~NMPattern("2:4").top(torch.rand(rows, columns, generator=generator)), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [4, 8, 12, 64, 132])
def test_a_matrix_comes_back(columns, dtype):
    weight = sparse(5, columns, dtype)
    assert torch.equal(unpack(pack(weight)), weight)


def test_indices_are_two_bits_each_from_the_lowest():
    for group in combinations(range(4), 2):
        for other in combinations(range(4), 2):
            weight = torch.zeros(1, 8)
            weight[0, list(group)], weight[0, [4 + i for i in other]] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
            packed = pack(weight)
            assert packed.values.tolist() == [[1.0, 2.0, 3.0, 4.0]]
            digits = f"{packed.indices.item():08b}"
            assert [int(digits[i : i + 2], 2) for i in (6, 4, 2, 0)] == [*group, *other]


def test_kept_zeros_come_back_as_they_were():
    weight = torch.tensor([[0.0, -0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, False, True, False, False, True, True]])
    packed = pack(weight, mask)
    assert packed.values.signbit().tolist() == [[True, False, False, False]]
    assert torch.equal(unpack(packed), weight)
    assert torch.equal(unpack(pack(weight)), weight)
    check_indices(pack(weight))


def test_what_is_not_2_of_4_is_refused():
    weight = sparse(3, 8)
    full = weight.clone()
    full[1, :4] = 1
    with pytest.raises(UserError, match=r"blocks\.1 is not 2:4 sparse"):
        pack(full, name="blocks.1")
    with pytest.raises(UserError, match="6 inputs"):
        pack(torch.zeros(2, 6))
    with pytest.raises(UserError, match="3 dimensions"):
        pack(torch.zeros(2, 4, 4))
    with pytest.raises(UserError, match="not 2:4 sparse"):
        pack(weight, weight == 0)
    with pytest.raises(UserError, match="not 2:4 sparse"):
        pack(weight, torch.ones_like(weight, dtype=torch.bool))


def test_indices_that_no_packing_makes_are_refused():
    packed = pack(sparse(3, 8))
    check_indices(packed)
    with pytest.raises(UserError, match="do not rise"):
        check_indices(Packed(packed.values, torch.full_like(packed.indices, 0b01_01_01_00)))
    with pytest.raises(UserError, match="do not fit"):
        check_indices(Packed(packed.values, packed.indices[:, :0]))


# int8.


def slowly(weight):
    """Rows of int8 and their scales, one weight at a time, in fp32."""
    rows, scales = [], []
    for row in weight.float():
        scale = row.abs().max() / torch.tensor(127.0)
        scales.append(scale if scale > 0 else torch.tensor(2.0**-126))
        rows.append([round(float(number / scales[-1])) for number in row])  # Python rounds ties to even, too
    return torch.tensor(rows), torch.stack(scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [4, 12, 132])
def test_int8_weights_are_the_nearest_multiples_of_their_row_s_scale(columns, dtype):
    weight = sparse(5, columns, dtype)
    weight[2] = 0
    packed, (dense, scales) = quantize(pack(weight)), slowly(weight)
    assert (packed.values.dtype, packed.scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(packed.scales, scales)
    assert torch.equal(unpack(packed._replace(scales=None)).int(), dense.int())
    for out in (torch.float32, dtype):
        wanted = (dense.double() * scales.double()[:, None]).float().to(out)  # exact until it is rounded
        assert torch.equal(unpack(packed, out), wanted)
    assert (unpack(packed, torch.float32)[weight == 0] == 0).all()
    assert torch.equal(packed.indices, pack(weight).indices)
    assert is_near(packed, weight)
    check_indices(packed)


def test_int8_ties_go_to_even():
    weight = torch.tensor([[127.0, 0.5, 0, 0, 1.5, -0.5, 0, 0, -2.5, 126.5, 0, 0]])
    assert quantize(pack(weight)).values.tolist() == [[127, 0, 2, 0, -2, 126]]


def test_int8_rows_of_very_small_weights_stay_near():
    weight = torch.tensor([[1e-43, 0.0, -3e-44, 0.0], [1e-37, 0.0, 1e-39, 0.0]])
    assert is_near(quantize(pack(weight)), weight)


@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_what_is_more_than_half_a_step_off_is_noticed(place):
    weight = sparse(3, 8)
    packed = quantize(pack(weight))
    packed.values[place] += 1 if packed.values[place] < 0 else -1
    assert not is_near(packed, weight)


def test_scales_that_no_packing_makes_are_refused():
    packed = quantize(pack(sparse(3, 8)))
    for scales in (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, torch.nan, 1.0]), -packed.scales):
        with pytest.raises(UserError, match="a scale is no positive number"):
            check_indices(packed._replace(scales=scales))
    for wrong in (packed._replace(scales=packed.scales[:2]), packed._replace(values=packed.values.short())):
        with pytest.raises(UserError, match="do not fit"):
            check_indices(wrong)
