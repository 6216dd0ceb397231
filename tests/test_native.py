"""The samplers' C++ loops against the eager form, and against machines that can't compile them."""

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import comb

import pytest
import torch

from roi_lightning import native
from roi_lightning.errors import UserError
from roi_lightning.native import Recipe
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, StraightThrough, compiling
from roi_lightning.samplers import native as sampler_loops
from roi_lightning.samplers.kept_norm import KeptNorm
from sampler_truth import PULL, SHAPE, exactly, relative, tensors

WARM, COLD = Draw(3, 7, 0.3, 0.5), Draw(3, 7, 0.002, 0.05)


@pytest.fixture(autouse=True)
def _switches(monkeypatch):
    monkeypatch.setattr(sampler_loops.loops, "broken", False)
    monkeypatch.setattr(compiling.kernels, "broken", False)


@pytest.fixture
def new_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROI_CACHE", str(tmp_path / "cache"))
    native.load.cache_clear()
    yield tmp_path / "cache"
    native.load.cache_clear()


def drawn(sampler, spec, dim, draw, kept_norm=False, dtype=torch.float32, shape=SHAPE):
    """Drawn weight, logits' gradient and reward."""
    weight, upstream, logits = tensors(sampler, spec, dim, dtype, shape)
    reward = KeptNorm(PULL, scale=torch.tensor(0.5)) if kept_norm else None
    out = sampler.masked_weight(weight, logits, NMPattern(spec), dim, draw, "layer", reward)
    (gradient,) = torch.autograd.grad(out, logits, upstream)
    return out.detach(), gradient, None if reward is None else reward.value


def _errors(sampler, spec, dim, draw, kept_norm):
    """Relative errors of drawn weight and gradient, then those of the eager form."""
    exact = exactly(sampler, spec, dim, draw, kept_norm)
    fast = drawn(sampler, spec, dim, draw, kept_norm)
    slow = drawn(replace(sampler, compiled=False), spec, dim, draw, kept_norm)
    if isinstance(sampler, StraightThrough):
        assert torch.equal(fast[0] != 0, slow[0] != 0)
    errors = [relative(x, true) for way in (fast, slow) for x, true in zip(way, exact, strict=False)]
    if kept_norm:
        # A sum of squares of what is drawn.
        torch.testing.assert_close(fast[2], slow[2], rtol=2e-6 + 2 * (errors[0] + errors[2]), atol=0.0)
    return errors


KINDS = {
    "paper": GumbelTopK(),
    "scaled": GumbelTopK("scaled"),
    "straight": StraightThrough(),
    "maskllm": Categorical(),
}


# Every pattern, dimension and sampler; each with each is slow.
DRAWS = [("paper", "2:4", 0), ("paper", "2:6", 1), ("scaled", "3:4", 0), ("scaled", "2:4", 1)]
DRAWS += [("straight", "2:4", 0), ("straight", "4:8", 1), ("maskllm", "2:4", 1), ("maskllm", "3:4", 0)]
OTHERS = [draw for draw in product(KINDS, ("2:4", "3:4", "2:6", "4:8"), (0, 1)) if draw not in DRAWS]


@pytest.mark.parametrize(
    ("kind", "spec", "dim"),
    [*DRAWS, *(pytest.param(*draw, marks=pytest.mark.slow) for draw in OTHERS)],
)
def test_loops_are_as_exact_as_the_eager_form(kind, spec, dim, monkeypatch):
    sampler = KINDS[kind]
    monkeypatch.setattr(compiling, "_compiled", lambda kernel: pytest.fail("another way was taken"))
    for kept_norm in (False, True):
        weight, gradient, eager_weight, eager_gradient = _errors(sampler, spec, dim, WARM, kept_norm)
        assert weight < 1e-6 + 2 * eager_weight
        assert gradient < 1e-6 + 2 * eager_gradient
    # Cold temperatures magnify the rounding of fp32, in a few groups that are nearly tied, others in every draw: on
    # average it may cost what it costs the eager form.
    errors = [_errors(sampler, spec, dim, replace(COLD, index=i), True) for i in range(8)]
    weight, gradient, eager_weight, eager_gradient = (torch.tensor(errors) + 1e-7).log().mean(0).exp()
    assert weight < 2 * eager_weight
    assert gradient < 2 * eager_gradient
    assert not sampler_loops.loops.broken


EIGHT_OF_SIXTEEN = pytest.param(GumbelTopK(), "8:16", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("sampler", "spec"), [(GumbelTopK(), "2:4"), (Categorical(), "2:8"), EIGHT_OF_SIXTEEN]
)
def test_bf16_is_rounded_once(sampler, spec):
    fast = drawn(sampler, spec, 1, WARM, dtype=torch.bfloat16)
    slow = drawn(replace(sampler, compiled=False), spec, 1, WARM, dtype=torch.bfloat16)
    # Where rounding to bf16 falls the other way, an entry differs by its last place.
    torch.testing.assert_close(fast[0], slow[0], rtol=2**-7, atol=1e-6)
    assert (fast[0] != slow[0]).float().mean() < 0.01
    assert relative(fast[1], slow[1]) < 1e-4


def test_older_processors_draw_alike(new_cache, monkeypatch):
    monkeypatch.setattr(native, "_TUNED", ((),))
    plain = drawn(GumbelTopK(), "2:4", 1, WARM)
    exact = exactly(GumbelTopK(), "2:4", 1, WARM)
    assert max(relative(ours, true) for ours, true in zip(plain, exact, strict=False)) < 1e-5
    assert not sampler_loops.loops.broken


@pytest.mark.parametrize("shape", [(1, 65540), (65540, 1), (4, 16411), (16412, 4)])
def test_groups_that_fill_no_block(shape):
    dim = 0 if shape[0] % 4 == 0 else 1
    fast, slow = (drawn(GumbelTopK(compiled=c), "2:4", dim, WARM, shape=shape) for c in (True, False))
    assert relative(fast[0], slow[0]) < 1e-5
    assert relative(fast[1], slow[1]) < 1e-5


@pytest.mark.parametrize("sampler", [GumbelTopK(), Categorical()], ids=str)
@pytest.mark.parametrize("openmp", [True, False])
def test_the_number_of_threads_changes_no_bit(sampler, openmp, monkeypatch):
    results = []
    if not openmp:
        monkeypatch.setattr(native, "openmp", lambda: 0)
    elif not torch.backends.openmp.is_available():
        pytest.skip("this torch works without OpenMP")
    else:
        assert native.openmp()
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(drawn(sampler, "2:4", 1, WARM, shape=(512, 268)))
    for out, gradient, _ in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("sampler", [GumbelTopK(), StraightThrough(), Categorical()], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_no_numbers_show(sampler, bad, dtype):
    pattern, weight = NMPattern("2:4"), torch.ones(SHAPE, dtype=dtype)
    logits = torch.zeros(sampler.logits_shape(SHAPE, pattern, 1))
    logits.view(-1)[1234] = bad
    assert not sampler.masked_weight(weight, logits, pattern, 1, WARM, "layer").isfinite().all()


# Compiling.


SOURCE = sampler_loops.SOURCES / "gumbel_top_k.cpp"
RECIPE = Recipe(SOURCE, (("M", 4), ("N", 1), ("WEIGHT", 0)))


def test_a_library_is_compiled_once_per_machine(new_cache, monkeypatch):
    assert sampler_loops.library(RECIPE) is not None
    (file,) = new_cache.iterdir()
    native.load.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *a: pytest.fail("compiled again"))
    assert sampler_loops.library(RECIPE) is not None
    assert list(new_cache.iterdir()) == [file]


@pytest.mark.parametrize("shared", [False, True])
def test_another_header_is_another_library(new_cache, tmp_path, monkeypatch, shared):
    assert sampler_loops.library(RECIPE) is not None
    folder = native._SHARED if shared else SOURCE.parent
    copied = shutil.copytree(folder, tmp_path / "cpp")
    header = next(path for path in sorted(copied.iterdir()) if path.suffix == ".hpp")
    header.write_text(header.read_text() + "// changed\n")
    native.load.cache_clear()
    if shared:
        monkeypatch.setattr(native, "_SHARED", copied)
        changed = RECIPE
    else:
        changed = replace(RECIPE, source=copied / SOURCE.name)
    assert sampler_loops.library(changed) is not None
    assert len(list(new_cache.iterdir())) == 2


def test_without_a_compiler_there_is_another_way(new_cache, monkeypatch, caplog):
    monkeypatch.setattr(native, "_compiler", lambda: "false")
    monkeypatch.setattr(compiling.kernels, "broken", True)
    monkeypatch.setattr(native, "_version", lambda compiler: "1")
    with caplog.at_level(logging.INFO):
        fast = drawn(GumbelTopK(), "2:4", 1, WARM)
    slow = drawn(GumbelTopK(compiled=False), "2:4", 1, WARM)
    assert relative(fast[1], slow[1]) < 1e-5
    assert sampler_loops.loops.broken
    assert not list(new_cache.iterdir())
    assert "can't be compiled" in caplog.text


def test_a_source_that_does_not_compile_is_told_by_the_compilers_own_error(new_cache):
    with pytest.raises((OSError, UserError), match="error"):
        native.load(Recipe(SOURCE, (("M", 4), ("N", 0), ("WEIGHT", 7))))


def test_two_processes_may_compile_at_once(new_cache):
    program = (
        "from roi_lightning.samplers.native import *\n"
        f"assert library(Recipe(SOURCES / {SOURCE.name!r}, {RECIPE.constants!r}))"
    )
    environment = {**os.environ, "ROI_CACHE": str(new_cache)}
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list(new_cache.iterdir())) == 1


@pytest.mark.parametrize("home", ["HOME", "XDG_CACHE_HOME"])
def test_libraries_are_kept_in_the_user_s_cache(monkeypatch, tmp_path, home):
    for name in ("ROI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(home, str(tmp_path))
    place = tmp_path / (".cache/roi_lightning" if home == "HOME" else "roi_lightning")
    assert native._folder() == place
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROI_CACHE", str(tmp_path / "file" / "cache"))
    native.load.cache_clear()
    assert sampler_loops.library(RECIPE) is not None
    native.load.cache_clear()


def test_candidates_are_in_the_order_of_the_eager_form():
    """Logits that choose one candidate each: the loops must keep that candidate's members."""
    pattern, weight = NMPattern("3:6"), torch.ones(comb(6, 3) * 600, 6)
    logits = torch.zeros(comb(6, 3), weight.shape[0], 1)
    for c in range(comb(6, 3)):
        logits[c, c :: comb(6, 3)] = 100.0
    sampler = Categorical()
    out = sampler.masked_weight(weight, logits, pattern, 1, Draw(0, 0, 0.1, 0.1), "layer")
    assert torch.equal(out > 0.5, sampler.hard_mask(logits, pattern, 1))
