"""Run by test_triton in a process where Triton interprets its kernels: errors against the eager form, as JSON."""

import json
from dataclasses import replace
from itertools import product

import torch

from helpers.sampler_truth import both_passes, exactly, in_shards, relative, tensors, with_rim
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import (
    Categorical,
    Draw,
    GumbelSubset,
    GumbelTopK,
    StraightThrough,
    on_device,
    triton_launch,
)

PATTERNS = ("2:4", "3:4", "2:6", "4:8")
SHAPE = 24, 120
TEMPERATURES = {"warm": (0.3, 0.5), "cold": (0.002, 0.05)}
SAMPLERS = GumbelTopK(), GumbelTopK("scaled"), StraightThrough(), GumbelSubset(), Categorical()


def by_kernels(sampler, weight, upstream, logits, pattern, draw):
    """The drawn weight and the logits' gradient."""
    if not weight.numel():  # a shard that has nothing
        return both_passes(sampler, weight, upstream, logits, pattern, draw)
    kernel, out, gradient = sampler.kernel(pattern), torch.empty_like(weight), torch.empty_like(logits)
    assert triton_launch.attempt(kernel, "masked_weight", (logits, weight, out), draw), "no kernel"
    assert triton_launch.attempt(kernel, "logits_gradient", (logits, weight, upstream, gradient), draw)
    return out, gradient


def both_ways(sampler, spec, draw, dtype=torch.float32, shape=SHAPE):
    """The drawn weight and the logits' gradient, of the eager form and of the kernels."""
    arguments = *tensors(sampler, spec, dtype, shape), NMPattern(spec), draw
    return both_passes(replace(sampler, compiled=False), *arguments), by_kernels(sampler, *arguments)


def errors(sampler, spec, draw):
    """Relative errors [eager, kernels] of the drawn weight and of the gradient."""
    # Of 70 candidates few groups: the interpreter goes through them one by one.
    shape = (8, 40) if isinstance(sampler, GumbelSubset) and spec == "4:8" else SHAPE
    exact = exactly(sampler, spec, draw, shape)
    both = both_ways(sampler, spec, draw, shape=shape)
    return [[relative(one, true) for one, true in zip(way, exact, strict=True)] for way in both]


def shards_are_parts(sampler):
    """Whether shards of stacked experts are drawn as parts of the whole, bit for bit."""
    pattern, draw = NMPattern("2:4"), Draw.of(3, 7, "experts", 0.3, 0.5)
    own = tensors(sampler, "2:4", shape=(7, 6, 20))
    whole = by_kernels(sampler, *own, pattern, draw)
    parts = in_shards(sampler, own, pattern, draw, [4, 0, 2, 1], by_kernels)
    return all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def numbers_are_read():
    """Whether what is read on the device is what a launch would put there itself."""
    draws = [Draw.of(3, index, "layer", 0.3 / (index + 1), 0.5) for index in range(3)]
    found = []
    for draw in (*draws, *on_device(draws, torch.device("cpu"))):
        own = tensors(GumbelTopK(), "2:4", shape=SHAPE)
        found.append(by_kernels(GumbelTopK(), *own, NMPattern("2:4"), draw)[0])
    alike = all(torch.equal(one, other) for one, other in zip(found[:3], found[3:], strict=True))
    return alike and not torch.equal(found[0], found[1])


def rim(sampler):
    """Whether logits of -inf, and others that are not finite, do as in the eager form, in both passes."""
    pattern, draw = NMPattern("2:4"), Draw((1, 2), 1.0, 1.0)
    weight, upstream, logits = tensors(sampler, "2:4", shape=(4, 16))
    arguments = weight, upstream, with_rim(sampler, logits, pattern), pattern, draw
    ours, eager = by_kernels(sampler, *arguments), both_passes(replace(sampler, compiled=False), *arguments)
    return all(torch.allclose(*both, atol=1e-6, equal_nan=True) for both in zip(ours, eager, strict=True))


def main(every=False):
    """All cases, or of each sampler and pattern one of the temperatures in turn."""
    found = {}
    for number, (sampler, spec) in enumerate(product(SAMPLERS, PATTERNS)):
        if isinstance(sampler, Categorical) and spec == "4:8":
            spec = "2:8"  # its kernel is for few candidates
        turn = (number + number // len(PATTERNS)) % 2
        for name, (lam, tau) in TEMPERATURES.items() if every else [list(TEMPERATURES.items())[turn]]:
            found[f"{sampler} {spec} {name}"] = errors(sampler, spec, Draw.of(3, 7, "layer", lam, tau))
    draw = Draw.of(3, 7, "layer", 0.3, 0.5)
    eager, ours = both_ways(GumbelTopK(), "2:4", draw, torch.float16)
    apart = (ours[0].double() - eager[0].double()).abs() / eager[0].double().abs().clamp(min=2**-14)
    fp16 = [float((apart > 0).double().mean()), float(apart.max()), relative(ours[1], eager[1])]
    facts = {
        "shards": [shards_are_parts(sampler) for sampler in SAMPLERS],
        "numbers": numbers_are_read(),
        "rim": [rim(sampler) for sampler in SAMPLERS],
        "disabled": triton_launch.kernels.disabled,
    }
    print(json.dumps({"errors": found, "fp16": fp16, **facts}))


if __name__ == "__main__":
    main()
