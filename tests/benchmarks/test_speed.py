"""The speed benchmarks: figures against sizes that can be counted, baselines against the samplers they stand for."""

import json
from itertools import combinations

import pytest
import torch

from benchmarks import sampler, step
from benchmarks.speed.baselines import PlainMaskLLM, PlainRoI
from benchmarks.speed.timing import peak_bytes
from helpers.lab import make_lab, plain_text
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelTopK

lab = pytest.fixture(make_lab)
CPU = torch.device("cpu")
MEGABYTE = 1 << 20


def rows_of(lab, script, *args):
    out = lab.folder / "figures.json"
    script.main([*args, "--rounds", "3", "--json", str(out)])
    return {
        (row["name"], row["pattern"], row.get("weights")): row for row in json.loads(out.read_text())["rows"]
    }


def test_the_most_that_is_held_at_once():
    def task():
        first = torch.zeros(MEGABYTE, dtype=torch.uint8)
        second = first + 1
        del first
        return second + 1  # where the first one was

    assert peak_bytes(task, CPU) == pytest.approx(2 * MEGABYTE, rel=0.01)


@pytest.mark.slow
def test_the_sampler_keeps_nothing_and_its_rivals_do(lab, capsys):
    rows = rows_of(lab, sampler, "--pattern", "2:4,2:8", "--weights", "65536", "--baselines")
    for spec, candidates in (("2:4", 6), ("2:8", 28)):
        ours, eager, naive, maskllm, published = (
            rows[f"sampler.forward{kind}", spec, 65536]
            for kind in ("", "_eager", "_autograd", "_maskllm", "_maskllm_published")
        )
        assert ours["saved_bytes_per_weight"] == eager["saved_bytes_per_weight"] == 0
        assert maskllm["saved_bytes_per_weight"] == 0
        assert naive["saved_bytes_per_weight"] >= 4 * NMPattern(spec).n, "a share per pick at least"
        m = NMPattern(spec).m
        assert published["saved_bytes_per_weight"] >= 4 * candidates / m, "the shares of all candidates"
        backward = rows["sampler.backward", spec, 65536]
        assert backward["temporary_bytes_per_weight"] == pytest.approx(4, abs=0.1), "the gradient alone"
    for row in rows.values():
        assert row["reference"] == "torch.exp"
    printed = plain_text(capsys.readouterr().out)
    assert "published" in printed
    assert "÷ exp" in printed


def test_plain_roi_has_the_sampler_s_distribution():
    torch.manual_seed(0)
    logits, weight, pattern = (
        torch.randn(1, 4).expand(20_000, 4).contiguous() * 0.3,
        torch.ones(20_000, 4),
        NMPattern("2:4"),
    )
    draw = Draw.of(0, 0, "layer", 0.7, 0.05)
    shares = [
        sampler.masked_weight(weight, logits, pattern, draw).mean(0)
        for sampler in (PlainRoI(), GumbelTopK(compiled=False))
    ]
    torch.testing.assert_close(*shares, atol=0.02, rtol=0)


def test_plain_maskllm_has_the_softmax_of_its_candidates():
    torch.manual_seed(0)
    logits, pattern = torch.randn(6), NMPattern("2:4")
    many = logits[:, None, None].expand(6, 20_000, 1).contiguous()
    mask = PlainMaskLLM().masked_weight(
        torch.ones(20_000, 4), many, pattern, Draw.of(0, 0, "layer", 0.5, 0.01)
    )
    wanted = torch.zeros(4)
    for share, kept in zip((logits / 0.5).softmax(0), combinations(range(4), 2), strict=True):
        wanted[list(kept)] += share
    torch.testing.assert_close(mask.mean(0), wanted, atol=0.02, rtol=0)
    assert Categorical().logits_shape((20_000, 4), pattern) == tuple(many.shape)


def test_a_step_beside_its_rivals(lab, capsys):
    rows = rows_of(lab, step, "--lm", str(lab.model), "--seq_len", "32", "--baselines")
    names = {name.removeprefix("step.roi_over_") for name, *_ in rows}
    assert names == {"dense", "maskllm", "maskllm_published", "roi_autograd"}
    prunable = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    for (name, *_), row in rows.items():
        assert row["held_bytes"] == 16 * prunable
        assert row["tokens"] == 2 * 32
        if "maskllm" in name:
            assert row["reference_held_bytes"] == 1.5 * row["held_bytes"]
    assert rows["step.roi_over_roi_autograd", "2:4", None]["reference_bytes"] > row["bytes"]
    assert "maskllm published" in plain_text(capsys.readouterr().out)
