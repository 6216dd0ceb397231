"""The samplers' C++ loops against the eager form, and against machines that can't compile them."""

import logging
from dataclasses import replace
from itertools import product

import pytest
import torch

from helpers.sampler_truth import SHAPE, both_passes, exactly, in_shards, relative, tensors, with_rim
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import (
    Categorical,
    Draw,
    GumbelSubset,
    GumbelTopK,
    StraightThrough,
    cpu_kernels,
)
from roi_lightning.utils import cpp_extension
from roi_lightning.utils.cpp_extension import Build

WARM = Draw.of(3, 7, "layer", 0.3, 0.5)


@pytest.fixture(autouse=True)
def _switches(monkeypatch):
    monkeypatch.setattr(cpu_kernels.kernels, "disabled", False)


@pytest.fixture
def new_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROI_CACHE", str(tmp_path / "cache"))
    cpp_extension.load.cache_clear()
    yield tmp_path / "cache"
    cpp_extension.load.cache_clear()


def drawn(sampler, spec, draw, dtype=torch.float32, shape=SHAPE):
    """Drawn weight and logits' gradient."""
    return both_passes(sampler, *tensors(sampler, spec, dtype, shape), NMPattern(spec), draw)


def _errors(sampler, spec, draw):
    """Relative errors of drawn weight and gradient, then those of the eager form."""
    exact = exactly(sampler, spec, draw)
    fast, slow = drawn(sampler, spec, draw), drawn(replace(sampler, compiled=False), spec, draw)
    if isinstance(sampler, StraightThrough):
        assert torch.equal(fast[0] != 0, slow[0] != 0)
    return [relative(x, true) for way in (fast, slow) for x, true in zip(way, exact, strict=True)]


KINDS = {
    "paper": GumbelTopK(),
    "scaled": GumbelTopK("scaled"),
    "straight": StraightThrough(),
    "maskllm": Categorical(),
    "subset": GumbelSubset(),
}


# Every sampler, at patterns whose kernels compile in seconds; the others, and each with each, are slow.
DRAWS = [("paper", "2:4"), ("scaled", "3:4"), ("scaled", "2:4")]
DRAWS += [("straight", "2:4"), ("straight", "1:6"), ("maskllm", "2:4"), ("maskllm", "3:4"), ("subset", "2:4")]
OTHERS = [draw for draw in product(KINDS, ("2:4", "3:4", "2:6", "4:8")) if draw not in DRAWS]


@pytest.mark.parametrize(
    ("kind", "spec"),
    [*DRAWS, *(pytest.param(*draw, marks=pytest.mark.slow) for draw in OTHERS)],
)
def test_cpp_kernels_are_as_exact_as_the_eager_form(kind, spec):
    sampler = KINDS[kind]
    weight, gradient, eager_weight, eager_gradient = _errors(sampler, spec, WARM)
    assert weight < 1e-6 + 2 * eager_weight
    assert gradient < 1e-6 + 2 * eager_gradient
    # Cold temperatures magnify the rounding of fp32, in a few groups that are nearly tied, others in every draw: on
    # average it may cost what it costs the eager form.
    errors = [_errors(sampler, spec, Draw.of(3, i, "layer", 0.002, 0.05)) for i in range(8)]
    weight, gradient, eager_weight, eager_gradient = (torch.tensor(errors) + 1e-7).log().mean(0).exp()
    assert weight < 2 * eager_weight
    assert gradient < 2 * eager_gradient
    assert not cpu_kernels.kernels.disabled


WIDE = [
    pytest.param(sampler, spec, marks=pytest.mark.slow)
    for sampler, spec in ((GumbelTopK(), "8:16"), (Categorical(), "2:8"))
]


@pytest.mark.parametrize(("sampler", "spec"), [(GumbelTopK(), "2:4"), (Categorical(), "2:4"), *WIDE])
@pytest.mark.parametrize(("dtype", "last_place"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_precision_is_rounded_once(sampler, spec, dtype, last_place):
    fast = drawn(sampler, spec, WARM, dtype=dtype)
    slow = drawn(replace(sampler, compiled=False), spec, WARM, dtype=dtype)
    # Where rounding falls the other way, an entry differs by its last place.
    torch.testing.assert_close(fast[0], slow[0], rtol=last_place, atol=1e-6)
    assert (fast[0] != slow[0]).float().mean() < 0.01
    assert relative(fast[1], slow[1]) < 1e-4


@pytest.mark.slow
def test_older_cpus_draw_alike(new_cache, monkeypatch):
    monkeypatch.setattr(cpp_extension, "_TUNED", ((),))
    plain = drawn(GumbelTopK(), "2:4", WARM)
    exact = exactly(GumbelTopK(), "2:4", WARM)
    assert max(relative(ours, true) for ours, true in zip(plain, exact, strict=True)) < 1e-5
    assert not cpu_kernels.kernels.disabled


@pytest.mark.parametrize("shape", [(1, 65540), (16411, 4), (16412, 4)])
def test_groups_that_fill_no_block(shape):
    fast, slow = (drawn(GumbelTopK(compiled=c), "2:4", WARM, shape=shape) for c in (True, False))
    assert relative(fast[0], slow[0]) < 1e-5
    assert relative(fast[1], slow[1]) < 1e-5


@pytest.mark.parametrize("sampler", [GumbelTopK(), Categorical()], ids=str)
@pytest.mark.parametrize("openmp", [True, False])
def test_the_number_of_threads_changes_no_bit(sampler, openmp, monkeypatch):
    results = []
    if not openmp:
        monkeypatch.setattr(cpu_kernels, "openmp", lambda: 0)
    elif not torch.backends.openmp.is_available():
        pytest.skip("this torch works without OpenMP")
    else:
        assert cpp_extension.openmp()
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(drawn(sampler, "2:4", WARM, shape=(512, 268)))
    for out, gradient in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("sampler", [GumbelTopK(), StraightThrough(), Categorical(), GumbelSubset()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, None])
def test_minus_infinity_is_never_taken_and_what_is_no_number_shows(sampler, dtype):
    compiled, dtype = dtype is not None, dtype or torch.float32
    pattern, (weight, upstream, logits) = NMPattern("2:4"), tensors(sampler, "2:4", dtype)
    logits = with_rim(sampler, logits, pattern)
    found = both_passes(replace(sampler, compiled=compiled), weight, upstream, logits, pattern, WARM)
    exact = exactly(sampler, "2:4", WARM, logits=logits.nan_to_num(0, 0, -1e3).double())
    for group, ours, true in zip((GumbelTopK().choices, sampler.choices), found, exact, strict=True):
        assert group(ours, pattern)[0, :3].isnan().all()
        group(ours, pattern)[0, :3] = group(true, pattern)[0, :3] = 0
        assert relative(ours, true) < max(1e-5, torch.finfo(dtype).eps)


def test_small_layers_have_no_compiled_code(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "library", lambda build: pytest.fail("compiled"))
    drawn(GumbelTopK(), "2:4", WARM, shape=(16, 16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("shape", "sizes"), [((7, 8, 64), [4, 0, 2, 1]), ((65, 64), [32, 32, 1])])
def test_a_shard_is_drawn_as_a_part_of_the_whole(kind, compiled, shape, sizes, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_MIN_WEIGHTS", 1)
    sampler, pattern = replace(KINDS[kind], compiled=compiled), NMPattern("2:4")
    own = tensors(sampler, "2:4", shape=shape)
    whole, parts = both_passes(sampler, *own, pattern, WARM), in_shards(sampler, own, pattern, WARM, sizes)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
    # The noise goes on where another rank's ends.
    assert not torch.equal(whole[0], drawn(sampler, "2:4", replace(WARM, first=1), shape=shape)[0])


# Compiling.


SOURCE = cpu_kernels.SOURCES / "gumbel_top_k.cpp"
BUILD = Build(SOURCE, (("M", 4), ("N", 1), ("WEIGHT", 0)))


def test_a_library_is_compiled_once_per_machine(new_cache, monkeypatch):
    assert cpu_kernels.library(BUILD) is not None
    (file,) = new_cache.iterdir()
    cpp_extension.load.cache_clear()
    monkeypatch.setattr(cpp_extension, "_compile", lambda *a: pytest.fail("compiled again"))
    assert cpu_kernels.library(BUILD) is not None
    assert list(new_cache.iterdir()) == [file]


@pytest.mark.parametrize("place", ["own", "shared"])
def test_another_header_is_another_library(new_cache, tmp_path, monkeypatch, place):
    monkeypatch.setattr(cpp_extension, "_SHARED", tmp_path / "shared")
    for name in ("own", "shared"):
        (tmp_path / name).mkdir()
    source = tmp_path / "own" / "one.cpp"
    source.write_text('#include "value.hpp"\nextern "C" int value() { return VALUE; }\n')
    for value in (1, 2):
        (tmp_path / place / "value.hpp").write_text(f"#define VALUE {value}\n")
        cpp_extension.load.cache_clear()
        assert cpp_extension.load(Build(source, ())).value() == value
    assert len(list(new_cache.iterdir())) == 2


def test_without_a_compiler_there_is_a_fallback(new_cache, monkeypatch, caplog):
    monkeypatch.setattr(cpp_extension, "_compiler", lambda: "false")
    monkeypatch.setattr(cpp_extension, "_version", lambda compiler: "1")
    with caplog.at_level(logging.INFO):
        fast = drawn(GumbelTopK(), "2:4", WARM)
    slow = drawn(GumbelTopK(compiled=False), "2:4", WARM)
    assert relative(fast[1], slow[1]) < 1e-5
    assert cpu_kernels.kernels.disabled
    assert not list(new_cache.iterdir())
    assert "can't be compiled" in caplog.text


@pytest.mark.parametrize("home", ["HOME", "XDG_CACHE_HOME"])
def test_libraries_are_kept_in_the_user_s_cache(monkeypatch, tmp_path, home):
    for name in ("ROI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(home, str(tmp_path))
    place = tmp_path / (".cache/roi_lightning" if home == "HOME" else "roi_lightning")
    assert cpp_extension.cache_folder() == place
    assert place.stat().st_mode & 0o777 == 0o700
