"""What a step of recovery takes, against one that trains all weights of the dense model.

    python -m benchmarks.recovery_cost EXPORT --base smollm2-135m --rounds 5 --json F.json

Whole optimizer steps with AdamW and clipped gradients, in turns, on random tokens, in float32 masters each.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from benchmarks.speed.timing import Ratio, Task, in_turns, peak_bytes
from roi_lightning.learning import RecoveryModule
from roi_lightning.learning.losses import next_token_nll, objective
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import resolve_model
from roi_lightning.utils.atomic_io import write_json
from roi_lightning.utils.tables import print_table


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    args = build_parser().parse_args(argv)
    ratios = list(ratios_of(args))
    rows = [
        [
            r.name,
            f"{r.ratio:.2f}",
            f"{min(r.seconds):.2f}",
            f"{r.more['bytes'] / r.more['reference_bytes']:.2f}",
        ]
        for r in ratios
    ]
    print_table(["", "time ÷ full fine-tuning", "quickest step, s", "peak memory ÷"], rows)
    if args.json:
        write_json(args.json, [r.to_json() for r in ratios])


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lm", help="an export")
    parser.add_argument("--base", required=True, help="the dense model")
    parser.add_argument("--batch_size", type=int, default=2, help="windows of a step")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser


def ratios_of(args: argparse.Namespace) -> Iterator[Ratio]:
    """Recovery without and with distillation, each against full fine-tuning."""
    device: torch.device = args.device
    dense = load_language_model(resolve_model(args.base), "float32", device=device).requires_grad_()
    learner = RecoveryModule(args.lm, base=args.base)
    learner.configure_model()
    learner.to(device)
    ids = torch.randint(0, dense.config.vocab_size, (args.batch_size, args.seq_len), device=device)
    tasks: dict[str, Task] = {
        "full fine-tuning": partial(fine_tune, dense, adamw(dense), ids),
        "recovery": partial(recover, learner, adamw(learner), ids, 0.0),
        "recovery, half distillation": partial(recover, learner, adamw(learner), ids, 0.5),
    }
    times = in_turns(tasks, args.rounds, device, "steps")
    peak = {name: peak_bytes(task, device) for name, task in tasks.items()}
    held = {name: held_bytes(module) for name, module in zip(tasks, (dense, learner, learner), strict=True)}
    reference, *others = tasks
    for name in others:
        more = {"tokens": ids.numel(), "bytes": peak[name] + held[name]}
        more["reference_bytes"] = peak[reference] + held[reference]
        yield Ratio(name, "", times[name], reference, times[reference], more)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """As in recover.yaml, with a rate that moves nothing far."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def held_bytes(module: nn.Module) -> int:
    """Of all parameters, and AdamW's two moments of those that are trained."""
    return sum(p.nbytes + (8 * p.numel() if p.requires_grad else 0) for p in module.parameters())


def fine_tune(lm: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    """One step on all weights."""
    total, count = next_token_nll(lm, ids)
    (total / count).backward()
    nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def recover(
    learner: RecoveryModule, optimizer: torch.optim.Optimizer, ids: Tensor, distillation: float
) -> None:
    """One step on the kept weights."""
    learner.prepare_step(0)
    loss, _ = objective(learner.model, ids, distillation, learner.dense())
    loss.backward()
    for layer in learner.layers.values():
        assert layer.kept.grad is not None
        layer.zero_pruned_(layer.kept.grad)
    nn.utils.clip_grad_norm_([layer.kept for layer in learner.layers.values()], 1.0)
    optimizer.step()
    for layer in learner.layers.values():
        layer.zero_pruned_(layer.kept.detach())
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
