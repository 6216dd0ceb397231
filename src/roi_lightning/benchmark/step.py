"""A training step, forward and backward without the optimizer, against dense training and other samplers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.benchmark.baselines import PlainMaskLLM, PlainRoI
from roi_lightning.benchmark.timing import Ratio, Task, in_turns, peak_bytes
from roi_lightning.learning.losses import next_token_nll
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, Sampler
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear

_DRAW = Draw(seed=0, index=0, lam=0.004, tau=0.1)
# The parameter, its gradient and AdamW's two moments, fp32.
_HELD_BYTES = 16


@dataclass(frozen=True)
class StepBenchmark:
    """What to measure.

    Attributes:
        lm: The language model, frozen, on the device.
        pattern: N:M.
        batch_size: Windows of a step.
        seq_len: Tokens of each.
        rounds: How often.
        baselines: Also both samplers as one would first write them, which take much more memory.
    """

    lm: PreTrainedModel
    pattern: NMPattern
    batch_size: int
    seq_len: int
    rounds: int
    baselines: bool

    def run(self, device: torch.device) -> Iterator[Ratio]:
        """Time and memory of a step of every kind, one after the other in every round."""
        kinds: dict[str, Sampler | None] = {"dense": None, "roi": GumbelTopK(), "maskllm": Categorical()}
        if self.baselines:
            kinds |= {"maskllm_published": PlainMaskLLM(), "roi_autograd": PlainRoI()}
        vocabulary = self.lm.config.get_text_config().vocab_size
        ids = torch.randint(0, vocabulary, (self.batch_size, self.seq_len), device=device)
        steps = {name: _step(self.lm, sampler, self.pattern, ids) for name, sampler in kinds.items()}
        times = in_turns({name: step for name, (step, _) in steps.items()}, self.rounds, device, "steps")
        peak = {name: peak_bytes(step, device) for name, (step, _) in steps.items()}
        held = {name: learned * _HELD_BYTES for name, (_, learned) in steps.items()}
        for other in [name for name in kinds if name != "roi"]:
            more = {"tokens": ids.numel(), "bytes": peak["roi"], "reference_bytes": peak[other]}
            more |= {"held_bytes": held["roi"], "reference_held_bytes": held[other]}
            pattern = str(self.pattern)
            yield Ratio(f"step.roi_over_{other}", pattern, times["roi"], other, times[other], more)


def _step(lm: PreTrainedModel, sampler: Sampler | None, pattern: NMPattern, ids: Tensor) -> tuple[Task, int]:
    """One forward and backward pass, and the number of logits it learns."""
    layers = prunable_layers(lm)
    if sampler is None:
        weights = [layer.weight for layer in layers.values()]
        return partial(_run, lm, {}, weights, ids), 0
    state = SharedState(pattern, sampler=sampler)
    state.draw, state.mode = _DRAW, "sample"
    learning = {name: SparseLinear(layer, name, state) for name, layer in layers.items()}
    logits = [torch.nn.init.normal_(layer.logits, std=0.01) for layer in learning.values()]
    return partial(_run, lm, learning, logits, ids), sum(p.numel() for p in logits)


def _run(
    lm: PreTrainedModel, learning: Mapping[str, nn.Module], learned: Sequence[Tensor], ids: Tensor
) -> None:
    dense = {name: lm.get_submodule(name) for name in learning}
    _put(lm, learning)
    for parameter in learned:
        parameter.requires_grad_()
    try:
        total, count = next_token_nll(lm, ids)
        (total / count).backward()
    finally:
        _put(lm, dense)
        for parameter in learned:
            parameter.requires_grad_(False)
            parameter.grad = None


def _put(lm: PreTrainedModel, layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        lm.set_submodule(name, layer)
