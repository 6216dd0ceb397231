"""`plan`: what a run will learn, hold in memory and read, from the configuration alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from roi_lightning.errors import UserError

_LABELS: Final = {
    "weights": "frozen weights",
    "logits": "logits, fp32",
    "gradients": "gradients, fp32",
    "optimizer": "optimizer state",
    "masked_weights": "masked weights kept for the backward pass",
    "total": "sum (activations and loss come on top)",
}


def main(argv: Sequence[str]) -> int:
    """Print the plan of a configuration.

    Args:
        argv: The arguments of `fit`, and `--json FILE`.

    Returns:
        The exit status.

    Raises:
        UserError: For a configuration that `fit` would refuse.
    """
    cli = _parse(argv)
    plan = _count(cli.model, cli.config.data, cli.config.trainer)
    show_plan(plan)
    if cli.config.json:
        Path(cli.config.json).write_text(json.dumps(plan, indent=2) + "\n")
    return 0


def make_plan(args: Sequence[str]) -> dict[str, Any]:
    """Count and add up.

    Args:
        args: As given to `fit`, without the command's name.

    Returns:
        `prunable`, `logits`, `bytes` by part, `tokens`, `steps`, and what they were derived from.

    Raises:
        UserError: For a configuration that `fit` would refuse.
    """
    cli = _parse(args)
    return _count(cli.model, cli.config.data, cli.config.trainer)


def _parse(args: Sequence[str]) -> Any:
    from roi_lightning.cli import RoICLI, build, plain_errors

    class PlanCLI(RoICLI):
        """Parses like `fit`, makes the learner, and leaves Trainer and data alone: their devices may not be here."""

        @override
        def init_parser(self, **kwargs: Any) -> Any:
            parser = super().init_parser(**kwargs, prog="python -m roi_lightning plan")
            parser.add_argument("--json", metavar="OUT", help="Also write the plan as JSON.")
            return parser

        @override
        def instantiate_classes(self) -> None:
            with plain_errors():
                self.model = self.parser.instantiate_classes(self.config).model

    return build(list(args), run=False, cli=PlanCLI)


def _count(learner: Any, data: Any, trainer: Any) -> dict[str, Any]:
    import torch

    from roi_lightning.language_model import load_config, meta_language_model
    from roi_lightning.prunable import check_pattern, input_dim, prunable_layers

    config = load_config(learner.source, learner.trust_remote_code)
    lm = meta_language_model(config, learner.trust_remote_code)
    layers = prunable_layers(lm, learner.targets, learner.ignore)
    check_pattern(layers, learner.pattern)
    itemsize = _itemsize(learner, config)
    prunable = sum(layer.weight.numel() for layer in layers.values())
    logits = sum(
        learner.learned_per_layer(tuple(layer.weight.shape), input_dim(layer)) for layer in layers.values()
    )
    blocks = config.get_text_config().num_hidden_layers if learner.activation_checkpointing else 1
    sizes = {
        "weights": sum(p.numel() for p in lm.parameters()) * itemsize,
        "logits": logits * torch.float32.itemsize,
        "gradients": logits * torch.float32.itemsize,
        "optimizer": logits * _state_bytes(learner.optimizer),
        "masked_weights": prunable * itemsize // blocks,
    }
    sizes["total"] = sum(sizes.values())
    ranks = _devices(trainer.devices) * int(trainer.num_nodes)
    per_step = trainer.accumulate_grad_batches * data.batch_size * data.seq_len * ranks
    if trainer.max_steps < 1:
        raise UserError(f"trainer.max_steps is {trainer.max_steps}; set it to the number of optimizer steps")
    return {
        "model": learner.source.spec,
        "pattern": str(learner.pattern),
        "layers": len(layers),
        "prunable": prunable,
        "logits": logits,
        "bytes": sizes,
        "steps": trainer.max_steps,
        "tokens_per_step": per_step,
        "tokens": trainer.max_steps * per_step,
        "devices": ranks,
    }


def _itemsize(learner: Any, config: Any) -> int:
    import torch

    name = learner.dtype_name
    if name == "auto":
        stored = config.get_text_config().dtype or torch.float32
        name = "bfloat16" if learner.source.kind == "gguf" else str(stored).removeprefix("torch.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize


def _state_bytes(optimizer: Any) -> int:
    """Bytes of optimizer state per learned parameter, seen by taking one step on a small tensor."""
    import torch

    probe = torch.nn.Parameter(torch.zeros(4096))
    probe.grad = torch.zeros_like(probe)
    made = optimizer([probe])
    made.step()
    held = (value for value in made.state[probe].values() if isinstance(value, torch.Tensor))
    return round(sum(value.numel() * value.element_size() for value in held) / probe.numel())


def _devices(devices: Any) -> int:
    """How many devices a setting names; one where it leaves the number to the machine (`auto`, -1)."""
    if isinstance(devices, list):
        return len(devices)
    text = str(devices)
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    return int(text) if text.isdigit() and int(text) else 1


def show_plan(plan: dict[str, Any]) -> None:
    """Print the plan as a table."""
    table = Table(title=f"{plan['model']} at {plan['pattern']}", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("prunable weights", f"{plan['prunable']:,} in {plan['layers']} layers")
    table.add_row("logits to learn", f"{plan['logits']:,}")
    table.add_section()
    for name, label in _LABELS.items():
        table.add_row(label, f"{plan['bytes'][name] / 2**30:,.2f} GiB")
    table.add_section()
    table.add_row("optimizer steps", f"{plan['steps']:,}")
    table.add_row(
        "tokens per step",
        f"{plan['tokens_per_step']:,}",
    )
    table.add_row("devices counted", f"{plan['devices']}")
    table.add_row("tokens", f"{plan['tokens']:,}")
    Console().print(table)
