"""Run by test_triton in a process where Triton interprets its kernels: errors against the eager form, as JSON."""

import json
from itertools import product

import torch

from roi_lightning.noise import noise_key
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import Draw, GumbelTopK, StraightThrough
from roi_lightning.samplers.kept_norm import KeptNorm
from roi_lightning.samplers.native_draws import columns_of
from roi_lightning.samplers.triton_draws import TritonWay, kernels
from sampler_truth import PULL, exactly, relative, tensors

PATTERNS = ("2:4", "3:4", "2:6", "4:8")
SHAPE = 24, 120
TEMPERATURES = {"warm": (0.3, 0.5), "cold": (0.002, 0.05)}


def both_ways(sampler, spec, dim, draw, kept_norm, dtype=torch.float32):
    """The drawn weight and the logits' gradient, of the eager form and of the kernels."""
    weight, upstream, logits = tensors(sampler, spec, dim, dtype, SHAPE)
    pattern = NMPattern(spec)
    reward = KeptNorm(PULL, scale=0.5) if kept_norm else None
    eager = sampler.masked_weight(weight, logits, pattern, dim, draw, "layer", reward)
    (gradient,) = torch.autograd.grad(eager, logits, upstream)
    ours = TritonWay(
        pattern,
        columns_of(weight, dim),
        noise_key(draw.seed, draw.index, "layer"),
        1 / draw.lam,
        1 / draw.tau,
        1.0 if sampler.push_down == "paper" else 1 / draw.tau,
        torch.tensor(PULL) if kept_norm else None,
        sampler.hard_forward,
    )
    out, of_logits = torch.empty_like(weight), torch.empty_like(logits)
    assert ours.masked_weight(weight, logits.detach(), out), "no kernel"
    assert ours.logits_gradient(weight, logits.detach(), upstream, of_logits), "no kernel"
    return (eager.detach(), gradient), (out, of_logits)


def errors(sampler, spec, dim, draw, kept_norm):
    """Relative errors [eager, kernels] of the drawn weight and of the gradient."""
    exact = exactly(sampler, spec, dim, draw, kept_norm, SHAPE)
    both = both_ways(sampler, spec, dim, draw, kept_norm)
    return [[relative(one, true) for one, true in zip(way, exact, strict=True)] for way in both]


def main():
    found = {}
    samplers = (
        GumbelTopK(compiled=False),
        GumbelTopK("scaled", compiled=False),
        StraightThrough(compiled=False),
    )
    for sampler, spec, (name, (lam, tau)) in product(samplers, PATTERNS, TEMPERATURES.items()):
        for dim in (0, 1):
            case = f"{sampler} {spec} {name} along {dim}"
            found[case] = errors(sampler, spec, dim, Draw(3, 7, lam, tau), kept_norm=bool(dim))
    eager, ours = both_ways(GumbelTopK(compiled=False), "2:4", 1, Draw(3, 7, 0.3, 0.5), False, torch.float16)
    apart = (ours[0].double() - eager[0].double()).abs() / eager[0].double().abs().clamp(min=2**-14)
    found["fp16"] = [float((apart > 0).double().mean()), float(apart.max()), relative(ours[1], eager[1])]
    out, bad = torch.empty(4, 8), torch.full((4, 8), torch.nan)
    way = TritonWay(NMPattern("2:4"), 1, (1, 2), 1.0, 1.0, 1.0, None, False)
    way.masked_weight(torch.ones(4, 8), bad, out)
    found["nan"] = [float(out.isnan().all()), float(kernels.broken)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
