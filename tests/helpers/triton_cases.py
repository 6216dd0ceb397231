"""Run by test_triton in a process where Triton interprets its kernels: errors against the eager form, as JSON."""

import json
from itertools import product

import torch

from helpers.sampler_truth import FACTOR, exactly, relative, tensors
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import (
    Categorical,
    Draw,
    GumbelSubset,
    GumbelTopK,
    StraightThrough,
    categorical_eager,
    subset_eager,
    top_k_eager,
    triton_launch,
)
from roi_lightning.samplers.base import DrawArgs
from roi_lightning.samplers.noise import noise_key

PATTERNS = ("2:4", "3:4", "2:6", "4:8")
SHAPE = 24, 120
TEMPERATURES = {"warm": (0.3, 0.5), "cold": (0.002, 0.05)}


def both_ways(sampler, spec, draw, kept_norm, dtype=torch.float32):
    """The drawn weight and the logits' gradient, of the eager form and of the kernels."""
    weight, upstream, logits = (x.detach() for x in tensors(sampler, spec, dtype, SHAPE))
    pattern, key = NMPattern(spec), noise_key(draw.seed, draw.index, "layer")
    args = DrawArgs(pattern.n, pattern.m, *key, draw.lam, draw.tau, kept_norm, True)
    if isinstance(sampler, Categorical):
        ways = categorical_eager, triton_launch.categorical
    elif isinstance(sampler, GumbelSubset):
        ways = subset_eager, triton_launch.subset
    else:
        push = 1.0 if sampler.push_down == "paper" else 1 / draw.tau
        args = args._replace(push=push, hard=sampler.hard_forward)
        ways = top_k_eager, triton_launch.top_k
    for kernel in ways:
        out, gradient = torch.empty_like(weight), torch.empty_like(logits)
        assert kernel.masked_weight(weight, logits, args, out), "no kernel"
        factor = torch.tensor(FACTOR)
        assert kernel.logits_gradient(weight, logits, upstream, factor, args, gradient), "no kernel"
        yield out, gradient


def errors(sampler, spec, draw, kept_norm):
    """Relative errors [eager, kernels] of the drawn weight and of the gradient."""
    exact = exactly(sampler, spec, draw, kept_norm, SHAPE)
    both = both_ways(sampler, spec, draw, kept_norm)
    return [[relative(one, true) for one, true in zip(way, exact, strict=True)] for way in both]


def main(every=False):
    """All cases, or of each sampler and pattern one of the four settings in turn."""
    found = {}
    samplers = GumbelTopK(), GumbelTopK("scaled"), StraightThrough(), GumbelSubset(), Categorical()
    settings = list(product(TEMPERATURES.items(), (False, True)))
    for number, (sampler, spec) in enumerate(product(samplers, PATTERNS)):
        if isinstance(sampler, Categorical) and spec == "4:8":
            spec = "2:8"  # its kernel is for few candidates
        turn = (number + number // len(PATTERNS)) % len(settings)
        for (name, (lam, tau)), kept_norm in settings if every else settings[turn : turn + 1]:
            case = f"{sampler} {spec} {name} kept norm {kept_norm}"
            found[case] = errors(sampler, spec, Draw(3, 7, lam, tau), kept_norm)
    eager, ours = both_ways(GumbelTopK(), "2:4", Draw(3, 7, 0.3, 0.5), False, torch.float16)
    apart = (ours[0].double() - eager[0].double()).abs() / eager[0].double().abs().clamp(min=2**-14)
    found["fp16"] = [float((apart > 0).double().mean()), float(apart.max()), relative(ours[1], eager[1])]
    out, bad = torch.empty(4, 8), torch.full((4, 8), torch.nan)
    args = DrawArgs(2, 4, 1, 2, 1.0, 1.0, False, True)
    for kernel in (triton_launch.top_k, triton_launch.subset):
        kernel.masked_weight(torch.ones(4, 8), bad, args, out.zero_())
        found.setdefault("nan", []).append(bool(out.isnan().all()))
    triton_launch.categorical.masked_weight(
        torch.ones(4, 8), torch.full((6, 4, 2), torch.nan), args, out.zero_()
    )
    found["nan"].append(bool(out.isnan().all()))
    found["nan"].append(triton_launch.kernels.disabled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
