"""A training step, forward and backward without the optimizer, against dense training and other samplers.

python -m benchmarks.step --random --rounds 5 --json F.json
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from roi_lightning.samplers.masked_linear import SharedState, SparseLinear
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from benchmarks.speed.baselines import PlainMaskLLM, PlainRoI
from benchmarks.speed.models import random_weights
from benchmarks.speed.script import Row, Script, Table, add_device, positive, times
from benchmarks.speed.timing import Ratio, Task, in_turns, peak_bytes
from roi_lightning.learning.losses import next_token_nll
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import enable_checkpointing, frozen_view, load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, Sampler

_DRAW = Draw(seed=0, index=0, lam=0.004, tau=0.1)
# The parameter, its gradient and AdamW's two moments, fp32.
_HELD_BYTES = 16
_NOTE: Final = "GiB: peak, beyond what is held; held: what is learned, its gradient and AdamW's states."
_BASELINES_NOTE: Final = (
    "roi autograd: without a backward pass of its own; maskllm published: as its authors wrote it."
)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    add = parser.add_argument
    add("--lm", default="smollm2-135m", help="hub id, directory, or GGUF (default: %(default)s)")
    add("--random", action="store_true", help="random weights: only the configuration is read")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the frozen weights (default: as stored; bfloat16 for GGUF and random ones)",
    )
    add("--pattern", default="2:4", help="N:M (default: %(default)s)")
    add("--batch_size", type=positive, default=2, help="windows (default: %(default)s)")
    add("--seq_len", type=positive, default=1024, help="tokens of each (default: %(default)s)")
    add("--activation_checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--baselines", action="store_true", help="also straightforward implementations")
    add_device(parser)
    Script(parser, _measure, _table).run(argv)


def _measure(args: argparse.Namespace) -> Iterator[Ratio]:
    lm, pattern = _language_model(args), NMPattern(args.pattern)
    return StepBenchmark(lm, pattern, args.batch_size, args.seq_len, args.rounds, args.baselines).run(
        args.device
    )


def _language_model(args: argparse.Namespace) -> Any:
    source = resolve_model(args.lm)
    if args.random:
        dtype = torch.bfloat16 if args.dtype == "auto" else getattr(torch, args.dtype)
        lm = frozen_view(random_weights(source, args.device, dtype))
    else:
        lm = load_language_model(source, args.dtype, device=args.device)
        lm.to(args.device)
    if args.activation_checkpointing:
        enable_checkpointing(lm)
    return lm


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    head = "a step of", "ms", "spread", "RoI's time ÷", "GiB", "and held"
    first = "roi", *times(rows[0]), "", *_memory(rows[0]["bytes"], rows[0]["held_bytes"])
    others = [
        (
            row["reference"].replace("_", " "),
            *times(row, "reference_"),
            f"{row['ratio']:,.2f}",
            *_memory(row["reference_bytes"], row["reference_held_bytes"]),
        )
        for row in rows
    ]
    return Table(head, [first, *others], f"{_NOTE} {_BASELINES_NOTE}" if args.baselines else _NOTE)


def _memory(temporary: int, held: int) -> tuple[str, str]:
    return f"{temporary / 2**30:,.2f}", f"{held / 2**30:,.2f}"


if __name__ == "__main__":
    main()
