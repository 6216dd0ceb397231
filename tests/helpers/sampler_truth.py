"""Draws in double precision, by autograd through the definitions: what fast samplers are held against."""

from dataclasses import replace
from itertools import combinations

import torch

from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical, GumbelSubset
from roi_lightning.samplers.noise import uniform
from roi_lightning.samplers.reference import relaxed_top_n

# Just worth compiled code; 336 * 240 / M is no multiple of sixteen groups for every M in the tests.
SHAPE = 336, 240


def normal(*shape, std=1.0, seed=0):
    """Normal values that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def tensors(sampler, spec, dtype=torch.float32, shape=SHAPE):
    """Weight, gradient of the drawn weight, logits."""
    generator = torch.Generator().manual_seed(5)
    weight, upstream = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    size = sampler.logits_shape(shape, NMPattern(spec))
    return weight, upstream, 0.05 * torch.randn(size, generator=generator)


def both_passes(sampler, weight, upstream, logits, pattern, draw):
    """The drawn weight and the logits' gradient."""
    out = torch.empty_like(weight)
    sampler.fill(out, weight, logits, pattern, draw)
    return out, sampler.logits_gradient(upstream, weight, logits, pattern, draw)


def in_shards(sampler, tensors, pattern, draw, sizes, passes=both_passes):
    """Both passes on shards along the weight's first axis, of these sizes, put together."""
    axis, parts, first = int(isinstance(sampler, Categorical)), [], 0
    weight, upstream, logits = tensors
    shards = zip(weight.split(sizes), upstream.split(sizes), logits.split(sizes, axis), strict=True)
    for own, gradient, own_logits in shards:
        here = replace(draw, first=first)
        parts.append(passes(sampler, own, gradient, own_logits.contiguous(), pattern, here))
        first += own.numel() // pattern.m
    drawn, gradients = zip(*parts, strict=True)
    return torch.cat(drawn), torch.cat(gradients, axis)


def exactly(sampler, spec, draw, shape=SHAPE):
    """Both passes on these in double precision, by autograd through the definitions."""
    weight, upstream, logits = (x.double() for x in tensors(sampler, spec, shape=shape))
    pattern, logits = NMPattern(spec), logits.requires_grad_()
    if isinstance(sampler, Categorical):
        soft = used = _mixture(_candidate_keys(logits, draw), pattern, draw.tau)
    elif isinstance(sampler, GumbelSubset):
        soft = used = _mixture(_sums_of_keys(logits, pattern, draw), pattern, draw.tau)
    else:
        noise = _noise(torch.arange(weight.numel()).view(weight.shape), draw)
        keys = pattern.group(logits), pattern.group(noise)
        soft = relaxed_top_n(*keys, pattern.n, draw.lam, draw.tau, sampler.push_down)
        soft = used = soft.flatten(-2)
        if sampler.hard_forward:
            used = pattern.top((logits / draw.lam + noise).detach()).double()
    (gradient,) = torch.autograd.grad(soft, logits, upstream * weight)
    return (used * weight).detach(), gradient


def _noise(index, draw):
    return -torch.log(-torch.log(uniform(index.to(torch.int32), draw.key).double()))


def _candidate_keys(logits, draw):
    count = len(logits)
    groups = torch.arange(logits[0].numel()).view(logits[0].shape)
    return logits / draw.lam + torch.stack([_noise(groups * count + c, draw) for c in range(count)])


def _sums_of_keys(logits, pattern, draw):
    keys = pattern.group(logits / draw.lam + _noise(torch.arange(logits.numel()).view(logits.shape), draw))
    kept = combinations(range(pattern.m), pattern.n)
    return torch.stack([keys[..., list(each)].sum(-1) for each in kept])


def _mixture(scores, pattern, tau):
    candidates = torch.zeros(len(scores), pattern.m, dtype=torch.double)
    for row, kept in zip(candidates, combinations(range(pattern.m), pattern.n), strict=True):
        row[list(kept)] = 1
    return ((scores / tau).softmax(0).movedim(0, -1) @ candidates).flatten(1)


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())
