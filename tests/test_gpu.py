"""What must hold on a CUDA device as well; skipped without one."""

import importlib
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import led_pruning
from helpers.lab import draw as draw_into
from helpers.sampler_truth import both_passes, in_shards, relative, tensors
from helpers.tiny_models import random_masks, tiny_gemma2, tiny_gpt2, tiny_llama
from roi_lightning.contrib.packed import from_packed, write_packed
from roi_lightning.contrib.proxsparse.proximal import apply_prox_
from roi_lightning.evaluation.perplexity import token_perplexity
from roi_lightning.export import write_export
from roi_lightning.learning.losses import objective
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.loading import freeze
from roi_lightning.models.source import resolve_model
from roi_lightning.oneshot import SparseGPT, Wanda
from roi_lightning.samplers import (
    Categorical,
    Draw,
    GumbelSubset,
    GumbelTopK,
    StraightThrough,
    on_device,
    triton_launch,
)
from roi_lightning.samplers.noise import gumbel, noise_key

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_noise_is_the_same_on_every_device():
    index = torch.arange(1 << 20, dtype=torch.int32)
    key = noise_key(1, 2, "layer")
    assert torch.allclose(gumbel(index, key), gumbel(index.cuda(), key).cpu(), atol=1e-5)


SAMPLERS = [GumbelTopK(), GumbelTopK("scaled"), StraightThrough(), Categorical(), GumbelSubset()]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("spec", ["2:4", "2:8", "3:6", "4:8"])
def test_drawn_weights_and_gradients_are_those_of_the_cpu(sampler, spec):
    own, draw = tensors(sampler, spec, shape=(336, 240)), Draw.of(0, 3, "layer", 0.05, 0.3, first=1 << 31)
    here = both_passes(sampler, *own, NMPattern(spec), draw)
    there = both_passes(sampler, *(x.cuda() for x in own), NMPattern(spec), draw)
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-3, atol=1e-3 * float(one.abs().max()))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("spec", ["2:4", "4:8", "3:6"])
def test_triton_draws_what_the_eager_form_draws(sampler, spec):
    results = []
    own = [x.cuda() for x in tensors(sampler, spec, torch.bfloat16, (336, 480))]
    (draw,) = on_device([Draw.of(3, 7, "layer", 0.3, 0.5)], own[0].device)
    for kind in (sampler, replace(sampler, compiled=False)):
        results.append(both_passes(kind, *own, NMPattern(spec), draw))
    assert not triton_launch.kernels.disabled
    (fast, of_fast), (slow, of_slow) = results
    torch.testing.assert_close(fast, slow, rtol=2**-7, atol=1e-6)
    assert (fast != slow).float().mean() < 0.01
    assert relative(of_fast, of_slow) < 1e-5


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_shard_is_drawn_as_a_part_of_the_whole(sampler):
    own = [x.cuda() for x in tensors(sampler, "2:4", torch.bfloat16, (7, 64, 256))]
    job = own, NMPattern("2:4"), Draw.of(3, 7, "layer", 0.3, 0.5)
    whole = both_passes(sampler, *own, *job[1:])
    for one, other in zip(whole, in_shards(sampler, *job, [4, 0, 2, 1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_other_draws_compile_nothing_and_wait_for_nothing(sampler):
    own = [x.cuda() for x in tensors(sampler, "2:4", torch.bfloat16)]
    kernels = importlib.import_module("roi_lightning.samplers.triton_kernels")
    compiled = []
    for index in range(4):
        draw = Draw.of(index, index, "layer", 0.5 / (index + 1), 1 / (index + 1), first=16 * index)
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        try:
            both_passes(sampler, *own, NMPattern("2:4"), *on_device([draw], own[0].device))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        caches = [getattr(kernels, name).device_caches for name in ("masked_weight", "logits_gradient")]
        compiled.append(sum(len(cache[0]) for each in caches for cache in each.values()))
    assert compiled[0] > 0
    assert compiled == compiled[:1] * 4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_step_never_waits_for_the_device(tmp_path, sampler):
    learner = RoILightningModule(str(tiny_llama(tmp_path / "m")), sampler=sampler, distillation=0.5)
    learner.configure_model()
    learner.cuda()
    ids = torch.randint(0, 250, (2, 32)).cuda()
    for attempt in ("warm up", "watched"):
        torch.cuda.set_sync_debug_mode("error" if attempt == "watched" else "default")
        try:
            draw_into(learner)
            objective(learner.student, learner.teacher, ids, 0.5)[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(logits.grad is not None for logits in learner.learned)


@pytest.mark.parametrize("strength", [0.05, 0.5, 5.0])
def test_proximal_points_are_the_same_on_every_device(strength):
    torch.manual_seed(0)
    weights = [torch.randn(256, 512)]
    weights.append(weights[0].cuda())
    for weight in weights:
        apply_prox_(weight, strength)
    near = (weights[0] - weights[1].cpu()).abs() <= 1e-5
    # Where two minima are equally deep within rounding, the devices may choose differently.
    assert near.float().mean() > 0.9999


def test_hard_masks_are_the_same_on_every_device():
    scores = torch.randint(0, 4, (64, 256)).float()
    pattern = NMPattern("2:4")
    assert torch.equal(pattern.top(scores), pattern.top(scores.cuda()).cpu())


@pytest.mark.parametrize("method", [Wanda, SparseGPT])
@pytest.mark.parametrize("builder", [tiny_llama, tiny_gpt2, tiny_gemma2])
def test_blocks_that_visit_the_device_are_pruned_as_on_the_cpu(tmp_path, builder, method):
    lm = freeze(AutoModelForCausalLM.from_pretrained(builder(tmp_path / "m")))
    windows = torch.randint(0, 250, (4, 32), generator=torch.Generator().manual_seed(0))
    here, given_here = led_pruning.prune(lm, method(), windows)
    # A near-tie that falls differently would change what all later layers are pruned for: see test_sparsegpt.
    there, given_there = led_pruning.prune(lm, method(), windows, "cuda", leader=here)
    assert all(parameter.device.type == "cpu" for parameter in lm.parameters())
    agreement = led_pruning.least_agreement(here, there)
    assert agreement[0] > 0.98, agreement  # near-ties may fall differently
    for name, pruned in here.items():
        other = there[name]
        if pruned.weight is not None and torch.equal(pruned.mask, other.mask.cpu()):
            torch.testing.assert_close(other.weight.cpu(), pruned.weight, rtol=1e-3, atol=1e-4)
        assert torch.equal(given_here[name].mask, given_there[name].mask.cpu())


def test_perplexity_is_the_same_on_every_device(tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "m")).eval()
    windows = torch.randint(0, 250, (4, 32), generator=torch.Generator().manual_seed(0))
    on_cpu = token_perplexity(lm, [windows])
    assert on_cpu == pytest.approx(token_perplexity(lm.cuda(), [windows]), rel=1e-4)


def test_a_packed_directory_is_unpacked(tmp_path):
    source = resolve_model(str(tiny_llama(tmp_path / "base")))
    dense = write_export(source, random_masks(source), tmp_path / "dense")
    write_packed(dense, tmp_path / "packed")
    wanted = AutoModelForCausalLM.from_pretrained(dense).eval().cuda()
    lm, ids = from_packed(tmp_path / "packed", device="cuda"), torch.arange(24, device="cuda")[None]
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, wanted(ids).logits)
