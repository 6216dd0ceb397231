"""The sampler alone: time and memory per weight, forward and backward, with its noise.

python -m benchmarks.sampler --pattern 2:4,2:8 --baselines --json F.json
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.speed.baselines import PlainMaskLLM, PlainRoI
from benchmarks.speed.script import Row, Script, Table, add_device, numbers, times
from benchmarks.speed.timing import Ratio, Task, in_turns, peak_bytes
from roi_lightning.masks.pattern import NMPattern
from roi_lightning.samplers import Categorical, Draw, GumbelTopK, Sampler, on_device

_COLUMNS = 4096
_DRAW = Draw.of(seed=0, index=0, name="layer", lam=0.004, tau=0.1)
_LABELS: Final = {
    "": "RoI",
    "eager": "eager",
    "autograd": "autograd",
    "maskllm": "MaskLLM",
    "maskllm_published": "published",
}
# Straight from the formulas: autograd keeps what it needs.
_PLAIN: Final = ("_autograd", "_maskllm_published")
_NOTE: Final = (
    "÷: times one torch.exp (on a GPU torch.add) over as many fp32 values; bytes: peak, per weight; "
    "saved: for the backward pass."
)
_BASELINES_NOTE: Final = (
    "eager: plain torch; autograd: RoI without a backward pass of its own; "
    "published: MaskLLM as its authors wrote it."
)


@dataclass(frozen=True)
class SamplerBenchmark:
    """What to measure.

    Attributes:
        weights: About how many, in a layer with 4,096 inputs.
        patterns: N:M each.
        rounds: How often.
        baselines: Also the eager form, plain autograd, and MaskLLM's samplers.
    """

    weights: int
    patterns: Sequence[NMPattern]
    rounds: int
    baselines: bool

    def run(self, device: torch.device) -> Iterator[Ratio]:
        """Forward and backward against one simple pass over as many fp32 values.

        That is `torch.exp` on a CPU, where arithmetic is the limit, and `torch.add` on a GPU, where memory is.
        """
        rows = max(1, self.weights // _COLUMNS)
        weight = torch.randn(rows, _COLUMNS, device=device).bfloat16()
        samplers: dict[str, Sampler] = {"": GumbelTopK()}
        if self.baselines:
            samplers |= {
                "_eager": GumbelTopK(compiled=False),
                "_autograd": PlainRoI(),
                "_maskllm": Categorical(),
                "_maskllm_published": PlainMaskLLM(),
            }
        simple = _simple_pass(weight)
        for pattern in self.patterns:
            for label, sampler in samplers.items():
                yield from self._measure(label, sampler, pattern, weight, simple)

    def _measure(
        self, label: str, sampler: Sampler, pattern: NMPattern, weight: Tensor, simple: tuple[str, Task]
    ) -> Iterator[Ratio]:
        shape = sampler.logits_shape(tuple(weight.shape), pattern)
        logits = (torch.randn(shape, device=weight.device) * 0.01).requires_grad_()
        (drawing,) = on_device([_DRAW], weight.device)
        draw = partial(sampler.masked_weight, weight, logits, pattern, drawing)
        saved = _saved_bytes(draw, weight, logits)
        out, gradient = torch.empty_like(weight), torch.randn_like(weight)
        passes: dict[str, Task] = {
            "forward": partial(sampler.fill, out, weight, logits, pattern, drawing),
            "backward": partial(sampler.logits_gradient, gradient, weight, logits, pattern, drawing),
        }
        if label in _PLAIN:
            backward = partial(torch.autograd.grad, draw(), logits, gradient, retain_graph=True)
            passes = {"forward": torch.no_grad()(draw), "backward": backward}
        reference, _ = simple
        times = in_turns(dict([simple]) | passes, self.rounds, weight.device, f"drawing {pattern} masks")
        for name, task in passes.items():
            more = {
                "weights": weight.numel(),
                "temporary_bytes_per_weight": peak_bytes(task, weight.device) / weight.numel(),
                "saved_bytes_per_weight": saved / weight.numel(),
            }
            title = f"sampler.{name}{label}"
            yield Ratio(title, str(pattern), times[name], reference, times[reference], more)


def _simple_pass(weight: Tensor) -> tuple[str, Task]:
    first, second, out = (torch.rand(weight.shape, device=weight.device) for _ in range(3))
    if weight.is_cuda:
        return "torch.add", partial(torch.add, first, second, out=out)
    return "torch.exp", partial(torch.exp, first, out=out)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampler", description=__doc__)
    add = parser.add_argument
    add("--pattern", default="2:4", help="N:M, separated by commas (default: %(default)s)")
    add(
        "--weights",
        type=numbers,
        default="16777216",
        help="in a layer, separated by commas (default: %(default)s)",
    )
    add("--baselines", action="store_true", help="also straightforward implementations")
    add_device(parser)
    Script(parser, _measure, _table).run(argv)


def _measure(args: argparse.Namespace) -> Iterator[Ratio]:
    patterns = [NMPattern(text) for text in args.pattern.split(",")]
    for weights in args.weights:
        yield from SamplerBenchmark(weights, patterns, args.rounds, args.baselines).run(args.device)


def _table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    reference = str(rows[0]["reference"]).removeprefix("torch.")
    head = "sampler", "N:M", "size", "pass", "ms", "spread", f"÷ {reference}", "bytes", "saved"
    cells = [
        (
            _LABELS[kind],
            row["pattern"],
            f"{row['weights'] / 1e6:.1f}M",
            "fwd" if name == "forward" else "bwd",
            *times(row),
            f"{row['ratio']:,.2f}",
            f"{row['temporary_bytes_per_weight']:,.1f}",
            f"{row['saved_bytes_per_weight']:,.1f}",
        )
        for row in rows
        for name, _, kind in [row["name"].removeprefix("sampler.").partition("_")]
    ]
    return Table(head, cells, f"{_NOTE} {_BASELINES_NOTE}" if args.baselines else _NOTE)


if __name__ == "__main__":
    main()
