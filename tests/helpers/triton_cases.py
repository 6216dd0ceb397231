"""Run by test_triton in a process where Triton interprets its kernels: errors against the eager form, as JSON."""

import json
from dataclasses import replace
from itertools import product

import torch

from helpers.sampler_truth import exactly, relative, tensors
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelSubset, GumbelTopK, StraightThrough, triton_launch

PATTERNS = ("2:4", "3:4", "2:6", "4:8")
SHAPE = 24, 120
TEMPERATURES = {"warm": (0.3, 0.5), "cold": (0.002, 0.05)}


def both_ways(sampler, spec, draw, dtype=torch.float32, shape=SHAPE):
    """The drawn weight and the logits' gradient, of the eager form and of the kernels."""
    weight, upstream, logits = (x.detach() for x in tensors(sampler, spec, dtype, shape))
    # What a launch makes itself on a GPU.
    numbers = torch.tensor([1 / draw.lam, 1 / draw.tau]).view(torch.int32)
    draw = replace(draw, numbers=torch.cat((torch.tensor(draw.key, dtype=torch.int32), numbers)))
    inputs = sampler.inputs(weight, logits, NMPattern(spec), draw)
    for kernel in (sampler.eager, sampler.kernels["cuda"]):
        out, gradient = torch.empty_like(weight), torch.empty_like(logits)
        assert kernel.fill(inputs, out), "no kernel"
        assert kernel.logits_gradient(inputs, upstream, gradient), "no kernel"
        yield out, gradient


def errors(sampler, spec, draw):
    """Relative errors [eager, kernels] of the drawn weight and of the gradient."""
    exact = exactly(sampler, spec, draw, SHAPE)
    both = both_ways(sampler, spec, draw)
    return [[relative(one, true) for one, true in zip(way, exact, strict=True)] for way in both]


def shard(sampler):
    """How the kernels' draw of the last rows differs from the last rows of the eager form's draw of all."""
    draw, rows, dim = Draw.of(3, 7, "layer", 0.3, 0.5), slice(7, 24), int(isinstance(sampler, Categorical))
    (whole, of_whole), _ = both_ways(sampler, "2:4", draw)
    weight, upstream, logits = (x.detach() for x in tensors(sampler, "2:4", torch.float32, SHAPE))
    first, numbers = 7 * SHAPE[1] // 4, torch.tensor([1 / 0.3, 1 / 0.5]).view(torch.int32)
    numbers = torch.cat((torch.tensor(draw.key, dtype=torch.int32), numbers))
    own = logits.narrow(dim, 7, 17).contiguous()
    inputs = sampler.inputs(weight[rows], own, NMPattern("2:4"), replace(draw, first=first, numbers=numbers))
    out, gradient = torch.empty_like(weight[rows]), torch.empty_like(own)
    sampler.kernels["cuda"].fill(inputs, out)
    sampler.kernels["cuda"].logits_gradient(inputs, upstream[rows].contiguous(), gradient)
    return max(relative(out, whole[rows]), relative(gradient, of_whole.narrow(dim, 7, 17)))


def main(every=False):
    """All cases, or of each sampler and pattern one of the two settings in turn."""
    found = {}
    samplers = GumbelTopK(), GumbelTopK("scaled"), StraightThrough(), GumbelSubset(), Categorical()
    settings = list(TEMPERATURES.items())
    for number, (sampler, spec) in enumerate(product(samplers, PATTERNS)):
        if isinstance(sampler, Categorical) and spec == "4:8":
            spec = "2:8"  # its kernel is for few candidates
        turn = (number + number // len(PATTERNS)) % len(settings)
        for name, (lam, tau) in settings if every else settings[turn : turn + 1]:
            case = f"{sampler} {spec} {name}"
            found[case] = errors(sampler, spec, Draw.of(3, 7, "layer", lam, tau))
    eager, ours = both_ways(GumbelTopK(), "2:4", Draw.of(3, 7, "layer", 0.3, 0.5), torch.float16)
    found["shard"] = [shard(sampler) for sampler in samplers]
    apart = (ours[0].double() - eager[0].double()).abs() / eager[0].double().abs().clamp(min=2**-14)
    found["fp16"] = [float((apart > 0).double().mean()), float(apart.max()), relative(ours[1], eager[1])]
    found["nan"] = []
    for sampler in (GumbelTopK(), GumbelSubset(), Categorical()):
        weight, pattern, numbers = (
            torch.ones(4, 8),
            NMPattern("2:4"),
            torch.tensor([1, 2, 1065353216, 1065353216]),
        )
        bad = torch.full(sampler.logits_shape((4, 8), pattern), torch.nan)
        draw, out = Draw((1, 2), 1.0, 1.0, numbers=numbers.int()), torch.zeros(4, 8)
        sampler.kernels["cuda"].fill(sampler.inputs(weight, bad, pattern, draw), out)
        found["nan"].append(bool(out.isnan().all()))
    found["nan"].append(triton_launch.kernels.disabled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
