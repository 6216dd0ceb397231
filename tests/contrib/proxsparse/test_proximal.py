"""The proximal operator: the global minimum by brute force, and what any such operator must leave alone."""

import itertools

import pytest
import torch

from helpers.lab import brute_top
from roi_lightning.contrib.proxsparse.proximal import apply_prox_, prox_2of4

DTYPES = [torch.float32, torch.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Of the largest scaled member: far from any change, where groups of 4, 3 and 2 meet, and beyond.
SIZES = [0.01, 0.1, 0.3, 0.45, 0.7, 1.0, 1.2, 1.5, 3.0, 100.0]


def groups(count, seed=0, dtype=torch.float64):
    """Signed, shuffled groups: of unlike members, of nearly equal ones, with zeros; the largest is 1."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand((4, count), generator=generator, dtype=torch.float64)
    z[:, ::3] = 1 - z[:, ::3] * torch.rand((1, len(z[0, ::3])), generator=generator)
    z[3, ::7] = 0
    z /= z.amax(0)
    order = torch.rand(z.shape, generator=generator).argsort(0)
    signs = torch.randint(0, 2, z.shape, generator=generator) * 2 - 1
    return (z.gather(0, order) * signs).to(dtype)


def objective(w, z, strength):
    a, b, c, d = w.abs()
    return (w - z).square().sum(0) / 2 + strength * (a * b * c + b * c * d + c * d * a + d * a * b)


def brute(z, strength):
    """Coordinate descent from 81 starts in the box between 0 and z; the best end and its objective."""
    size = z.abs()
    starts = torch.tensor(list(itertools.product((0, 0.4, 1), repeat=4)), dtype=z.dtype).T
    w = size[:, :, None] * starts[:, None]
    for _ in range(300):
        for i in range(4):
            j, k, m = (x for x in range(4) if x != i)
            w[i] = (size[i][:, None] - strength * (w[j] * w[k] + w[k] * w[m] + w[m] * w[j])).clamp(min=0)
    found, start = objective(w, size[:, :, None], strength).min(1)
    return w[:, torch.arange(len(start)), start] * z.sign(), found


@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_no_start_leads_lower(size, dtype):
    z, strength = groups(500, dtype=dtype) * 0.3, size / 0.3
    w = prox_2of4(z, strength)
    assert w.dtype == dtype
    z, w = z.double(), w.double()
    best, lowest = brute(z, strength)
    slack = 1e-9 if dtype == torch.float32 else 1e-12
    assert (objective(w, z, strength) <= lowest * (1 + slack)).all()
    torch.testing.assert_close(w, best, rtol=0, atol=0.3 * (1e-6 if dtype == torch.float32 else 1e-8))


# Points whose last member lies so low that it takes the other root of the equation that all members solve.
LOW = [[0.393, 0.386, 0.339, 0.115], [0.397, 0.381, 0.352, 0.129], [0.388, 0.374, 0.343, 0.105]]


@pytest.mark.parametrize("point", LOW, ids=str)
def test_a_minimum_with_one_low_member_is_found(point):
    w = torch.tensor(point, dtype=torch.float64)[:, None]
    pairs = [[w[j] * w[k] for j, k in itertools.combinations({0, 1, 2, 3} - {i}, 2)] for i in range(4)]
    z = w + torch.stack([sum(products) for products in pairs])
    torch.testing.assert_close(brute(z, 1.0)[0], w, rtol=0, atol=1e-8)
    torch.testing.assert_close(prox_2of4(z, 1.0), w, rtol=0, atol=1e-8)


@dtypes
def test_strength_zero_is_the_identity(dtype):
    z = torch.randn((4, 100), generator=torch.Generator().manual_seed(3), dtype=dtype)
    assert torch.equal(prox_2of4(z, 0.0), z)


@dtypes
@pytest.mark.parametrize("strength", [1e4, 1e30, 1e38])
def test_a_huge_strength_leaves_the_top_two_untouched(strength, dtype):
    z = torch.randn((4, 400), generator=torch.Generator().manual_seed(4), dtype=dtype) * 20
    z[:, 0] = 1.0
    z[2:, 1] = 1e-25
    keep = brute_top(z.abs().T, 2, 4).T
    assert torch.equal(prox_2of4(z, strength), z.masked_fill(~keep, 0))


@dtypes
@pytest.mark.parametrize("strength", [1e-3, 0.5, 1.0, 50.0])
def test_two_of_four_stays_as_it_is(strength, dtype):
    z = groups(400, seed=5, dtype=dtype)
    z = z.masked_fill(~brute_top(z.abs().T, 2, 4).T, 0)
    assert torch.equal(prox_2of4(z, strength), z)


@dtypes
def test_odd_groups(dtype):
    nan, inf = torch.nan, torch.inf
    z = torch.tensor(
        [[1, nan, 2, 3], [nan, inf, 1, 1], [inf, 1, -2, 1], [-inf, inf, inf, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
        dtype=dtype,
    ).T
    wanted = torch.tensor(
        [[1, nan, 2, 3], [nan, inf, 1, 1], [inf, 0, -2, 0], [-inf, inf, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]],
        dtype=dtype,
    ).T
    torch.testing.assert_close(prox_2of4(z, 10.0), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-15, 1e-9])
def test_tiny_groups_are_not_lost(scale):
    z = groups(100, seed=6, dtype=torch.float32) * scale
    torch.testing.assert_close(prox_2of4(z, 1.0), z, rtol=0, atol=scale * 1e-7)


def test_among_equals_the_lower_index_stays():
    for strength in (1.22, 1.3, 5.0):
        assert prox_2of4(torch.ones(4, 1), strength)[:, 0].tolist() == [1, 1, 0, 0]


def test_a_weight_is_grouped_along_its_inputs():
    # More groups than are solved at once, in chunks that do not come out even.
    rows = torch.randn((700, 120), generator=torch.Generator().manual_seed(7))
    wanted = prox_2of4(rows.view(-1, 4).T, 0.7).T.reshape(rows.shape)
    weight = rows.clone()
    before = weight.data_ptr()
    apply_prox_(weight, 0.7)
    assert weight.data_ptr() == before
    torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-6)
