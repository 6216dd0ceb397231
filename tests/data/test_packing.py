"""2:4 matrices in fewer bytes, and back."""

from itertools import combinations

import pytest
import torch

from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.runtime import Packed, pack, unpack
from roi_lightning.runtime.packed_format import check_indices


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


def test_bytes_are_nine_sixteenths():
    weight = sparse(96, 256)
    assert 16 * pack(weight).nbytes == 9 * weight.nbytes


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
