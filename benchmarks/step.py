"""A training step, forward and backward without the optimizer, against dense training and other samplers.

python -m benchmarks.step --random --rounds 5 --json F.json
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from benchmarks.speed.baselines import PlainMaskLLM, PlainRoI
from benchmarks.speed.models import random_weights
from benchmarks.speed.script import Row, Script, Table, add_device, positive, times
from benchmarks.speed.timing import Ratio, Task, in_turns, peak_bytes
from roi_lightning.learning.losses import next_token_nll
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.models.layers import prunable_layers
from roi_lightning.models.loading import enable_checkpointing, frozen_view, load_language_model
from roi_lightning.models.source import ModelSource, resolve_model
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, Sampler, on_device

_LAM: Final = 0.004
_TAU: Final = 0.1
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
        source: Where it is from.
        checkpointing: Whether activations are computed again in the backward pass.
        pattern: N:M.
        batch_size: Windows of a step.
        seq_len: Tokens of each.
        rounds: How often.
        baselines: Also both samplers as one would first write them, which take much more memory.
    """

    lm: PreTrainedModel
    source: ModelSource
    checkpointing: bool
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
        steps = {name: self._step(sampler, ids) for name, sampler in kinds.items()}
        times = in_turns({name: step for name, (step, _) in steps.items()}, self.rounds, device, "steps")
        peak = {name: peak_bytes(step, device) for name, (step, _) in steps.items()}
        held = {name: learned * _HELD_BYTES for name, (_, learned) in steps.items()}
        for other in [name for name in kinds if name != "roi"]:
            more = {"tokens": ids.numel(), "bytes": peak["roi"], "reference_bytes": peak[other]}
            more |= {"held_bytes": held["roi"], "reference_held_bytes": held[other]}
            pattern = str(self.pattern)
            yield Ratio(f"step.roi_over_{other}", pattern, times["roi"], other, times[other], more)

    def _step(self, sampler: Sampler | None, ids: Tensor) -> tuple[Task, int]:
        """One forward and backward pass, and the number of logits it learns."""
        if sampler is None:
            names = {layer.parameter for layer in prunable_layers(self.lm).values()}
            return partial(_run_dense, self.lm, [self.lm.get_parameter(name) for name in names], ids), 0
        learner = RoILightningModule(
            self.lm,
            pattern=str(self.pattern),
            sampler=sampler,
            activation_checkpointing=self.checkpointing,
        )
        learner.configure_model()
        for logits in learner.learned:
            torch.nn.init.normal_(logits, std=0.01)
        return partial(_run, learner, ids), sum(p.numel() for p in learner.learned)


def _run_dense(lm: PreTrainedModel, weights: Sequence[Tensor], ids: Tensor) -> None:
    for weight in weights:
        weight.requires_grad_()
    try:
        total, count = next_token_nll(lm, ids)
        (total / count).backward()
    finally:
        for weight in weights:
            weight.requires_grad_(False)
            weight.grad = None


def _run(learner: RoILightningModule, ids: Tensor) -> None:
    _, student = learner.models()
    draws = [Draw.of(0, 0, name, _LAM, _TAU) for name in learner.tensors]
    learner.draws = dict(zip(learner.tensors, on_device(draws, ids.device), strict=True))
    learner.fill(learner.draw)
    total, count = next_token_nll(student, ids)
    (total / count).backward()
    learner.zero_grad()


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
    lm, source = _language_model(args), resolve_model(args.lm)
    sizes = args.batch_size, args.seq_len, args.rounds, args.baselines
    benchmark = StepBenchmark(lm, source, args.activation_checkpointing, NMPattern(args.pattern), *sizes)
    return benchmark.run(args.device)


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
