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


def exactly(sampler, spec, draw, shape=SHAPE, logits=None):
    """Both passes on these, or other logits, in double precision, by autograd through the definitions."""
    weight, upstream, own = (x.double() for x in tensors(sampler, spec, shape=shape))
    logits = own if logits is None else logits
    drawn = exact_mask(sampler, logits.requires_grad_(), NMPattern(spec), draw) * weight
    return drawn.detach(), torch.autograd.grad(drawn, logits, upstream)[0]


def exact_mask(sampler, logits, pattern, draw):
    """The mask of double logits; a hard one has the relaxation's gradient."""
    if isinstance(sampler, Categorical):
        return _mixture(_candidate_keys(logits, draw), pattern, draw.tau)
    if isinstance(sampler, GumbelSubset):
        return _mixture(_sums_of_keys(logits, pattern, draw), pattern, draw.tau)
    noise = _noise(torch.arange(logits.numel()).view(logits.shape), draw)
    keys = pattern.group(logits), pattern.group(noise)
    soft = relaxed_top_n(*keys, pattern.n, draw.lam, draw.tau, sampler.push_down).flatten(-2)
    if not sampler.hard_forward:
        return soft
    return pattern.top((logits / draw.lam + noise).detach()) + soft - soft.detach()


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
    return ((scores / tau).softmax(0).movedim(0, -1) @ candidate_masks(pattern)).flatten(-2)


def candidate_masks(pattern):
    """All masks of a group, [C, M], double."""
    kept = combinations(range(pattern.m), pattern.n)
    return torch.tensor([[float(i in members) for i in range(pattern.m)] for members in kept]).double()


def with_rim(sampler, logits, pattern):
    """Logits with one choice of each group at -inf, or as many as can be, and with three groups that are bad."""
    logits = logits.clone()
    choices = sampler.choices(logits, pattern)
    spare = choices.shape[-1] - sampler.picks(pattern)
    choices[..., 0] = choices[::2, ..., :spare] = -torch.inf
    for group, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        choices[0, group, : spare + 1] = bad
    return logits


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())
