"""The samplers that `torch.compile` makes against the eager ones, and against a machine that can't compile.

They are for GPUs; on a processor they run where the C++ loops can't, and so they do here.
"""

import logging
from itertools import product

import pytest
import torch

from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import Draw, GumbelTopK, StraightThrough, compiling, native
from roi_lightning.samplers.kept_norm import KeptNorm

SHAPE = 320, 256
END = Draw(seed=3, index=7, lam=0.002, tau=0.05)
# Each with each is for `-m slow`: a compilation takes seconds.
DRAWS = [(GumbelTopK, 1, True), (StraightThrough, 0, False)]
OTHERS = [draw for draw in product((GumbelTopK, StraightThrough), (0, 1), (True, False)) if draw not in DRAWS]
WARM = Draw(seed=3, index=7, lam=0.3, tau=0.5)


@pytest.fixture(autouse=True)
def _fresh_switch(monkeypatch):
    monkeypatch.setattr(compiling.kernels, "broken", False)
    monkeypatch.setattr(native.loops, "broken", True)


def both_ways(sampler, pattern, dim, draw, kept_norm=False, dtype=torch.float32):
    """Drawn weight, logits' gradient and reward; compiled or not by the sampler's own option."""
    generator = torch.Generator().manual_seed(5)
    weight, upstream = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
    logits = (0.05 * torch.randn(SHAPE, generator=generator)).requires_grad_()
    reward = KeptNorm(0.3, scale=torch.tensor(0.5)) if kept_norm else None
    drawn = sampler.masked_weight(weight, logits, NMPattern(pattern), dim, draw, "layer", reward)
    (gradient,) = torch.autograd.grad(drawn, logits, upstream)
    return drawn.detach(), gradient, None if reward is None else reward.value


@pytest.mark.parametrize(
    ("kind", "dim", "kept_norm"),
    [*DRAWS, *(pytest.param(*draw, marks=pytest.mark.slow) for draw in OTHERS)],
)
def test_compiled_draws_are_the_eager_ones_up_to_rounding(kind, dim, kept_norm):
    for draw, tolerance in ((WARM, 1e-5), (END, 2e-4)):
        fast, slow = (both_ways(kind(compiled=c), "2:4", dim, draw, kept_norm) for c in (True, False))
        torch.testing.assert_close(fast[0], slow[0], rtol=0, atol=tolerance)
        if kind is StraightThrough:
            assert torch.equal(fast[0] != 0, slow[0] != 0)
        error = (fast[1] - slow[1]).norm() / slow[1].norm()
        assert error < tolerance
        torch.testing.assert_close(fast[2], slow[2])
    assert not compiling.kernels.broken


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "push_down"), [("1:4", "paper"), ("3:4", "paper"), ("3:4", "scaled")])
def test_compiled_other_patterns_and_bf16(pattern, push_down):
    fast, slow = (
        both_ways(GumbelTopK(push_down, compiled=c), pattern, 1, WARM, dtype=torch.bfloat16)
        for c in (True, False)
    )
    # Where rounding to bf16 falls the other way, an entry differs by its last place.
    torch.testing.assert_close(fast[0], slow[0], rtol=2**-7, atol=1e-6)
    assert (fast[0] != slow[0]).float().mean() < 0.01
    assert (fast[1] - slow[1]).norm() / slow[1].norm() < 1e-4
    assert not compiling.kernels.broken


def test_small_layers_are_not_compiled(monkeypatch):
    monkeypatch.setattr(compiling, "_compiled", lambda kernel: pytest.fail("compiled"))
    monkeypatch.setattr(native, "library", lambda recipe: pytest.fail("compiled"))
    weight = torch.ones(16, 16)
    GumbelTopK().masked_weight(weight, torch.zeros(16, 16), NMPattern("2:4"), 1, WARM, "layer")


def test_a_machine_without_a_compiler_says_so_once_and_goes_on(monkeypatch, caplog):
    def no_compiler(kernel):
        raise RuntimeError("no C++ compiler found\nand much more")

    monkeypatch.setattr(compiling, "_compiled", no_compiler)
    with caplog.at_level(logging.WARNING):
        found = [both_ways(GumbelTopK(), "2:4", 1, WARM) for _ in range(2)]
    slow = both_ways(GumbelTopK(compiled=False), "2:4", 1, WARM)
    for drawn, gradient, _ in found:
        assert torch.equal(drawn, slow[0])
        assert torch.equal(gradient, slow[1])
    (record,) = caplog.records
    assert "eagerly" in record.message
    assert "no C++ compiler found" in record.message
    assert "much more" not in record.message
