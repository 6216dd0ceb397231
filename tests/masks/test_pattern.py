import pytest
import torch
import yaml

from helpers.lab import brute_top
from roi_lightning.errors import UserError
from roi_lightning.masks.pattern import NMPattern

PATTERNS = ["1:2", "1:4", "2:4", "3:4", "2:8", "4:8", "8:16"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("2:4", (2, 4)),
        (" 2:4 ", (2, 4)),
        ("2 : 4", (2, 4)),
        (124, (2, 4)),
        (64, (1, 4)),
        ("8:16", (8, 16)),
        ("16:64", (16, 64)),
        (NMPattern("4:8"), (4, 8)),
    ],
)
def test_reads_every_form(spec, expected):
    pattern = NMPattern(spec)
    assert (pattern.n, pattern.m) == expected
    assert NMPattern(str(pattern)) == pattern


@pytest.mark.parametrize("text", ["1:2", "1:4", "2:4", "2:8", "4:8", "8:16", "16:32", "32:64", "2:64"])
def test_yaml_means_the_same_with_and_without_quotes(text):
    assert NMPattern(yaml.safe_load(text)) == NMPattern(yaml.safe_load(f'"{text}"')) == NMPattern(text)


@pytest.mark.parametrize(
    "spec", ["5:4", "0:4", "4:4", "2-4", "a", -1, "", "2:", "-1:4", "2:4:8", 0, yaml.safe_load("5:4")]
)
def test_refuses_and_names_the_value(spec):
    with pytest.raises(UserError) as caught:
        NMPattern(spec)
    named = "{}:{}".format(*divmod(spec, 60)) if isinstance(spec, int) else spec
    assert named in str(caught.value)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("spec", PATTERNS)
def test_top_breaks_ties_towards_the_lower_index(spec, dim):
    pattern = NMPattern(spec)
    scores = torch.randint(0, 4, (48, 32), generator=torch.Generator().manual_seed(1)).float()
    expected = brute_top(scores.T if dim == 0 else scores, pattern.n, pattern.m)
    mask = pattern.top(scores, dim)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected.T if dim == 0 else expected)
    assert pattern.holds(mask, dim)


@pytest.mark.parametrize("spec", ["128:512", "256:512", "64:257", "300:1024"])
@pytest.mark.parametrize("dim", [0, 1])
def test_groups_of_more_than_256_keep_the_same_with_and_without_ties(spec, dim):
    pattern, generator = NMPattern(spec), torch.Generator().manual_seed(2)
    scores = torch.rand((3, 2 * pattern.m), generator=generator, dtype=torch.float64)
    ties = torch.randint(0, 9, scores.shape, generator=generator).float()
    for values in (scores, ties):
        mask = pattern.top(values if dim == 1 else values.T, dim)
        assert torch.equal(mask if dim == 1 else mask.T, brute_top(values, pattern.n, pattern.m))
        assert pattern.holds(mask, dim)


def test_holds_notices_one_wrong_group_in_one_direction():
    pattern = NMPattern("2:4")
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
    assert pattern.holds(mask, 1)
    assert pattern.holds(mask, 0)
    mask[0] = torch.tensor([0, 1, 1, 0], dtype=torch.bool)
    assert pattern.holds(mask, 1)
    assert not pattern.holds(mask, 0)


def test_check_names_the_layer_the_size_and_the_pattern():
    NMPattern("2:4").check(64)
    with pytest.raises(UserError, match=r"2:3.*h\.0\.mlp.* 64 "):
        NMPattern("2:3").check(64, "h.0.mlp")
