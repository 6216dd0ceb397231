import math
import random
import zlib

import pytest
import torch

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Draw, GumbelTopK
from roi_lightning.samplers.noise import gumbel, noise_key, uniform

COUNT = 1 << 20
INDEX = torch.arange(COUNT, dtype=torch.int32)
KEY = noise_key(42, 7, "model.layers.0.mlp.up_proj")
OTHERS = {
    "seed": noise_key(43, 7, "model.layers.0.mlp.up_proj"),
    "draw": noise_key(42, 8, "model.layers.0.mlp.up_proj"),
    "layer": noise_key(42, 7, "model.layers.1.mlp.up_proj"),
}
FULL = 0xFFFFFFFF


def slow_mix(x: int, key: tuple[int, int]) -> int:
    """The mixer with Python's unbounded integers."""
    x = (x + key[0]) & FULL
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & FULL
    x = ((x ^ (x >> 15)) + key[1]) & FULL
    x = (x * 0x846CA68B) & FULL
    return x ^ (x >> 16)


def slow_uniform(x: int, key: tuple[int, int]) -> float:
    return ((slow_mix(x, key) >> 9) + 0.5) / 2**23


def slow_splitmix(state: int) -> int:
    """The first number of the published SplitMix64 generator from a state."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z // 2**shift) * factor % 2**64
    return z ^ z // 2**31


def slow_key(seed: int, draw: int, layer: str) -> tuple[int, int]:
    of_seed = slow_splitmix(seed % 2**64)
    of_draw = slow_splitmix(of_seed ^ draw % 2**64)
    halves = divmod(slow_splitmix(of_draw ^ zlib.crc32(layer.encode("utf-8"))), 2**32)
    return tuple(half - 2**32 if half >= 2**31 else half for half in halves)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]).double())[0, 1].item()


def test_mixer_equals_slow_integers():
    rng = random.Random(0)
    for _ in range(50):
        key = (rng.randrange(-(1 << 31), 1 << 31), rng.randrange(-(1 << 31), 1 << 31))
        index = [rng.randrange(-(1 << 31), 1 << 31) for _ in range(100)] + [0, -1, (1 << 31) - 1, -(1 << 31)]
        expected = [slow_uniform(i, key) for i in index]
        assert uniform(torch.tensor(index, dtype=torch.int32), key).tolist() == expected


def test_keys_equal_slow_integers():
    assert slow_splitmix(1234567) == 6457827717110365317, "its published first value"
    rng = random.Random(0)
    for _ in range(200):
        seed, draw = rng.choice([rng.randrange(100), -1, rng.randrange(2**63)]), rng.randrange(10**6)
        layer = f"model.layers.{rng.randrange(80)}.{rng.choice(['q_proj', 'ä', ''])}"
        assert noise_key(seed, draw, layer) == slow_key(seed, draw, layer)


def test_noise_of_today_stays():
    """Other values, and no run that was interrupted before a change learns the mask it would have learned."""
    assert KEY == (-1125728645, -362169781)
    values = [u * 2**24 for u in uniform(INDEX[:6], KEY).tolist()]
    assert values == [14129375, 13365091, 3934191, 8015983, 15194735, 15161551]
    logits = (torch.arange(16.0) - 8).view(2, 8) / 50
    draw = Draw.of(42, 7, "model.layers.0.mlp.up_proj", 0.5, 0.7)
    mask = GumbelTopK().masked_weight(torch.ones(2, 8), logits, NMPattern("2:4"), draw)
    expected = [
        [0.910955, 0.779619, 0.084956, 0.224470, 0.912614, 0.921607, 0.030058, 0.135722],
        [1.144323, 0.027586, 0.528163, 0.299928, 1.140451, 0.719926, 0.019975, 0.119648],
    ]
    torch.testing.assert_close(mask, torch.tensor(expected), rtol=0, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_cutting_up_the_indices_changes_nothing(chunk):
    index = INDEX[:3000]
    pieces = [gumbel(piece, KEY) for piece in index.split(chunk)]
    assert torch.equal(torch.cat(pieces), gumbel(index, KEY))
    shuffled = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(index[shuffled].view(50, 60), KEY).flatten(), gumbel(index, KEY)[shuffled])


def test_noise_goes_on_beyond_the_range_of_int32():
    draw, pattern = Draw(KEY, 1.0, 1.0, first=1 << 31), NMPattern("2:4")
    index = torch.arange(1 << 33, (1 << 33) + 32).to(torch.int32)
    assert torch.equal(draw.noise_like(torch.empty(2, 16), pattern), gumbel(index.view(2, 16), KEY))
    index = torch.arange(((1 << 31) + 5) * 70, ((1 << 31) + 8) * 70).to(torch.int32)
    assert torch.equal(draw.noise(range(5, 8), 70, index.device), gumbel(index.view(3, 70), KEY))


@pytest.mark.parametrize("other", OTHERS)
def test_each_coordinate_gives_independent_noise(other):
    a, b = gumbel(INDEX, KEY), gumbel(INDEX, OTHERS[other])
    assert (a == b).double().mean() < 1e-4
    for lag in range(4):
        assert abs(correlation(a[lag:], b[: COUNT - lag])) < 4 / math.sqrt(COUNT)
    assert not torch.equal(a.sort().values, b.sort().values), "the same values in another order"


@pytest.mark.parametrize(
    ("index", "mixed"), [(0, 0), (180364566, 0x1FF), (-705040444, FULL), (1735712685, 0xFFFFFE00)]
)
def test_extreme_bits_give_finite_noise(index, mixed):
    element, expected = torch.tensor([index], dtype=torch.int32), 2**-24 if mixed < 512 else 1 - 2**-24
    assert slow_mix(index, (0, 0)) == mixed
    assert uniform(element, (0, 0)).item() == expected
    assert gumbel(element, (0, 0)).item() == pytest.approx(-math.log(-math.log(expected)), rel=1e-5)


@pytest.mark.parametrize("key", [KEY, *OTHERS.values()])
def test_gumbel_distribution(key):
    noise = gumbel(INDEX, key).double()
    euler, variance = 0.5772156649015329, math.pi**2 / 6
    assert abs(noise.mean().item() - euler) < 4 * math.sqrt(variance / COUNT)
    # The distribution's kurtosis is 27/5.
    assert abs(noise.var().item() - variance) < 4 * variance * math.sqrt((27 / 5 - 1) / COUNT)
    cdf = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(COUNT + 1, dtype=torch.float64) / COUNT
    distance = torch.maximum(steps[1:] - cdf, cdf - steps[:-1]).max().item()
    assert distance * math.sqrt(COUNT) < 2.23  # exceeded by 1 in 10,000 true samples


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 576, 4096])
def test_neighbours_are_uncorrelated(lag):
    noise = gumbel(INDEX, KEY)
    assert abs(correlation(noise[lag:], noise[:-lag])) < 4 / math.sqrt(COUNT)
