"""`plan`: what a run will learn, hold in memory and read, from the configuration alone."""

import json
import resource
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from roi_lightning.atomic import check_writable, written_aside

_SPREAD: Final = ("weights", "logits", "gradients", "optimizer")
_LABELS: Final = {
    "weights": "frozen weights",
    "logits": "logits, fp32",
    "gradients": "gradients, fp32",
    "optimizer": "optimizer state",
    "masked_weights": "masked weights, kept for the backward pass",
    "activations": "activations, kept for the backward pass",
    "loss": "loss: as wide as the vocabulary",
    "total": "most of these at once",
    "process": "on a processor, with Python and libraries",
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
    if cli.config.json:
        check_writable(Path(cli.config.json))
    limit = _limit(cli)
    planner, step, trainer = _planned(cli)
    plan = _count(planner, step, trainer)
    show_plan(plan)
    tried = []
    if limit is not None:
        from roi_lightning.commands import fit_in

        tried = fit_in.ways(planner, step, limit)
        added = tried[-1].arguments(step, _micro_batch_counts(cli))
        plan["fit_in"] = fit_in.as_json(tried, added, limit)
    if cli.config.json:
        with written_aside(Path(cli.config.json)) as partial:
            partial.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    if limit is not None:
        fit_in.show(tried, added, limit)
    return 0


def make_plan(args: Sequence[str]) -> dict[str, Any]:
    """Count and add up.

    Args:
        args: As given to `fit`, without the command's name.

    Returns:
        `prunable`, `logits`, `bytes` by part (on a device that holds everything), `spread` (bytes that each device
        keeps of weights, logits, gradients and optimizer states where they are spread, else None), `tokens`,
        `steps`, `validate_every_steps` (None if validation is not counted in micro-batches or steps), and what they
        were derived from.

    Raises:
        UserError: For a configuration that `fit` would refuse.
    """
    cli = _parse(args)
    return _count(*_planned(cli))


def _parse(args: Sequence[str]) -> Any:
    from roi_lightning.cli import RoICLI, build
    from roi_lightning.complaints import plain_errors

    class PlanCLI(RoICLI):
        """Parses like `fit`, makes learner and data, and leaves the Trainer alone: its devices may not be here."""

        @override
        def init_parser(self, **kwargs: Any) -> Any:
            parser = super().init_parser(**kwargs, prog="python -m roi_lightning plan")
            parser.add_argument("--json", metavar="OUT", help="Also write the plan as JSON.")
            parser.add_argument(
                "--fit_in",
                "--fit-in",
                metavar="SIZE",
                help="Say what makes it fit in a GPU's memory, like 80GB.",
            )
            return parser

        @override
        def instantiate_classes(self) -> None:
            with plain_errors():
                made = self.parser.instantiate_classes(self.config)
            self.model, self.datamodule = made.model, made.data

    return build(list(args), run=False, cli=PlanCLI)


def _planned(cli: Any) -> tuple[Any, Any, Any]:
    """The planner, the configured step, and the section `trainer` with Lightning's counts."""
    from roi_lightning.language_model import check_length
    from roi_lightning.planning import Planner, Step
    from roi_lightning.run_settings import check_trainer, count_micro_batches

    data, given = cli.datamodule, cli.config.trainer
    check_trainer(given)
    trainer = given.clone()
    count_micro_batches(trainer, given, data, _ranks(trainer))
    cli.model.check_settings()
    check_length(cli.model.source, data.seq_len, cli.model.trust_remote_code)
    parts, checkpointing = trainer.accumulate_grad_batches, cli.model.activation_checkpointing
    return Planner(cli.model), Step(data.batch_size, data.seq_len, parts, checkpointing), trainer


def _micro_batch_counts(cli: Any) -> dict[str, int]:
    """The options that count micro-batches of the configured size."""
    trainer, counts = cli.config.trainer, {}
    if trainer.accumulate_grad_batches is not None or cli.datamodule.windows_per_step is None:
        counts["--trainer.accumulate_grad_batches"] = trainer.accumulate_grad_batches or 1
    if type(trainer.val_check_interval) is int:
        counts["--trainer.val_check_interval"] = trainer.val_check_interval
    return counts


def _limit(cli: Any) -> int | None:
    from roi_lightning.commands.fit_in import parse_size

    return parse_size(cli.config.fit_in) if cli.config.fit_in else None


def _count(planner: Any, step: Any, trainer: Any) -> dict[str, Any]:
    ranks = _ranks(trainer)
    windows = step.accumulate * step.batch_size * ranks
    every = trainer.val_check_interval
    sizes = planner.sizes(step)
    # A processor's allocator rarely gives back what one part had before another needs room. Besides, this process
    # has loaded what a run loads, and nothing large.
    sizes["process"] = sum(sizes.values()) - sizes["total"] + _most_resident()
    return {
        "model": planner.learner.source.spec,
        "pattern": str(planner.learner.pattern),
        "layers": planner.layers,
        "prunable": planner.prunable,
        "logits": planner.learned,
        "bytes": sizes,
        "steps": trainer.max_steps,
        "windows_per_step": windows,
        "micro_batches": step.accumulate,
        "tokens_per_step": windows * step.seq_len,
        "tokens": trainer.max_steps * windows * step.seq_len,
        "validate_every_steps": every / step.accumulate if type(every) is int else None,
        "devices": ranks,
        "spread": round(sum(sizes[part] for part in _SPREAD) / ranks) if _spreads(trainer.strategy) else None,
    }


def _spreads(strategy: Any) -> bool:
    """Whether a setting names the strategy that spreads a model over devices."""
    from roi_lightning.sharded_strategy import ShardedStrategy

    module, _, name = getattr(strategy, "class_path", "").rpartition(".")
    return bool(module) and issubclass(getattr(import_module(module), name), ShardedStrategy)


def _most_resident() -> int:
    """The most memory this process has held so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _ranks(trainer: Any) -> int:
    return _devices(trainer.devices) * int(trainer.num_nodes)


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
    table.add_row("windows per step", f"{plan['windows_per_step']:,}")
    table.add_row("tokens per step", f"{plan['tokens_per_step']:,}")
    table.add_row("devices counted", f"{plan['devices']}")
    table.add_row("micro-batches per step on each", f"{plan['micro_batches']:,}")
    if plan["validate_every_steps"] is not None:
        table.add_row("steps between validations", f"{plan['validate_every_steps']:,g}")
    if plan["spread"] is not None:
        table.add_row("the first four, spread over them", f"{plan['spread'] / 2**30:,.2f} GiB each")
    table.add_row("tokens", f"{plan['tokens']:,}")
    Console().print(table)
