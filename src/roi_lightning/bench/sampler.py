"""The sampler alone: time and memory per weight, forward and backward, with its noise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roi_lightning.bench.rivals import PlainMaskLLM, PlainRoI
from roi_lightning.bench.timing import Figure, Task, in_turns, most_allocated
from roi_lightning.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, Sampler

_COLUMNS = 4096
_DRAW = Draw(seed=0, index=0, lam=0.004, tau=0.1)


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        weights: About how many, in a layer with 4,096 inputs.
        patterns: N:M each.
        rounds: How often.
        rivals: Also the eager form, plain autograd, and MaskLLM's samplers.
    """

    weights: int
    patterns: Sequence[NMPattern]
    rounds: int
    rivals: bool


def sampler_figures(job: Job, device: torch.device) -> Iterator[Figure]:
    """Forward and backward against one simple pass over as many fp32 numbers.

    That is `torch.exp` on a CPU, where arithmetic is the limit, and `torch.add` on a GPU, where memory is.
    """
    rows = max(1, job.weights // _COLUMNS)
    weight = torch.randn(rows, _COLUMNS, device=device).bfloat16()
    gradient = torch.randn_like(weight)
    reference, simple = _simple_pass(weight)
    for pattern in job.patterns:
        for label, sampler in _samplers(job.rivals).items():
            yield from _figures(label, sampler, pattern, (weight, gradient), (reference, simple), job.rounds)


def _samplers(rivals: bool) -> dict[str, Sampler]:
    ours: dict[str, Sampler] = {"": GumbelTopK()}
    if not rivals:
        return ours
    return ours | {
        "_eager": GumbelTopK(compiled=False),
        "_autograd": PlainRoI(),
        "_maskllm": Categorical(),
        "_maskllm_published": PlainMaskLLM(),
    }


def _simple_pass(weight: Tensor) -> tuple[str, Task]:
    first, second, out = (torch.rand(weight.shape, device=weight.device) for _ in range(3))
    if weight.is_cuda:
        return "torch.add", partial(torch.add, first, second, out=out)
    return "torch.exp", partial(torch.exp, first, out=out)


def _figures(
    label: str,
    sampler: Sampler,
    pattern: NMPattern,
    tensors: tuple[Tensor, Tensor],
    simple: tuple[str, Task],
    rounds: int,
) -> Iterator[Figure]:
    weight, gradient = tensors
    shape = sampler.logits_shape(tuple(weight.shape), pattern, 1)
    logits = (torch.randn(shape, device=weight.device) * 0.01).requires_grad_()
    draw = partial(sampler.masked_weight, weight, logits, pattern, 1, _DRAW, "layer")
    saved = _saved_bytes(draw, weight, logits)
    drawn = draw()

    def backward() -> object:
        return torch.autograd.grad(drawn, logits, gradient, retain_graph=True)

    def forward() -> object:
        with torch.no_grad():
            return draw()

    name, reference = simple
    times = in_turns({name: reference, "forward": forward, "backward": backward}, rounds, weight.device)
    for way, task in (("forward", forward), ("backward", backward)):
        more: dict[str, Any] = {"weights": weight.numel()}
        more["temporary_bytes_per_weight"] = most_allocated(task, weight.device) / weight.numel()
        more["saved_bytes_per_weight"] = saved / weight.numel()
        yield Figure(f"sampler.{way}{label}", str(pattern), times[way], name, times[name], more)


def _saved_bytes(draw: Task, weight: Tensor, logits: Tensor) -> int:
    """Bytes that a draw keeps for its backward pass; its arguments and its result are there anyway."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        drawn = draw()
    assert isinstance(drawn, Tensor)
    for own in (weight, logits, drawn):
        kept.pop(own.untyped_storage().data_ptr(), None)
    return sum(kept.values())
