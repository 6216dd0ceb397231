"""`plan`: what a run will learn, hold in memory and read, from the configuration alone."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from typing_extensions import override

from roi_lightning.cli import fit_in
from roi_lightning.cli.lightning import RoICLI, build, tell_what_is_not_written
from roi_lightning.learning.base import MaskLearningModule, tell_if_slow
from roi_lightning.learning.fsdp import FSDP2Strategy
from roi_lightning.learning.memory_plan import Planner, Step
from roi_lightning.learning.optim import check_trainer, count_micro_batches
from roi_lightning.masks.layer_patterns import is_mixed
from roi_lightning.utils.atomic_io import check_writable, write_json
from roi_lightning.utils.devices import choose_device, peak_memory
from roi_lightning.utils.tables import print_table
from roi_lightning.utils.third_party import plain_errors, silence_warnings

_LABELS: Final = {
    "weights": "frozen weights",
    "logits": "{learns}, fp32",
    "gradients": "gradients, fp32",
    "optimizer": "optimizer state",
    "masked_weights": "masked weights",
    "activations": "activations{kept}",
    "loss": "loss: as wide as the vocabulary",
    "total": "peak",
    "process": "on a CPU, with Python and libraries",
}


class PlanCLI(RoICLI):
    """Parses like `fit`, makes learner and data, and leaves the Trainer alone: its devices may not be here."""

    @override
    def init_parser(self, **kwargs: Any) -> Any:
        parser = super().init_parser(**kwargs)
        parser.add_argument("--json", type=Path | None, help="File to write the plan to as JSON, too.")
        parser.add_argument("--fit_in", help="Say what makes the run fit in a GPU's memory, like 80GB.")
        return parser

    @override
    def instantiate_classes(self) -> None:
        with plain_errors():
            made = self.parser.instantiate_classes(self.config)
        self.model, self.datamodule, self.trainer = made.model, made.data, made.trainer


def main(argv: Sequence[str]) -> None:
    """Print the plan of a configuration.

    Args:
        argv: The arguments of `fit`, `--json FILE` and `--fit_in SIZE`.

    Raises:
        UserError: For a configuration that `fit` would refuse.
    """
    silence_warnings()
    cli = build(list(argv), "plan", PlanCLI)
    out, size = cli.config.json, cli.config.fit_in
    if out:
        check_writable(out)
    limit = fit_in.parse_size(size) if size else None
    planner, step, trainer = _planned(cli)
    plan, found = _count(planner, step, trainer), {}
    if limit is not None:
        tried = fit_in.candidate_settings(planner, step, limit)
        added = tried[-1].arguments(step, _micro_batch_counts(cli))
        found = {"fit_in": fit_in.as_json(tried, added, limit)}
    if out:
        write_json(out, plan | found)
    show_plan(plan, planner.learner)
    if limit is not None:
        fit_in.show(tried, added, limit)


def make_plan(args: Sequence[str]) -> dict[str, Any]:
    """Count and add up.

    Args:
        args: As given to `fit`, without the command's name.

    Returns:
        `prunable`, `logits`, `bytes` by part (on a device that holds everything; `process` with this process's
        peak memory), `spread` (bytes that each device keeps of both models, logits, gradients and optimizer states
        where they are sharded, else None), `tokens`, `steps`, `validate_every_steps` (None if
        validation is not counted in micro-batches or steps), and what they were derived from.

    Raises:
        UserError: For a configuration that `fit` would refuse.
    """
    return _count(*_planned(build(list(args), "plan", PlanCLI)))


def _planned(cli: RoICLI) -> tuple[Planner, Step, Any]:
    """The planner, the configured step, and the section `trainer` with Lightning's counts."""
    data, given = cli.datamodule, cli.config.trainer
    check_trainer(given)
    data.check_files()
    trainer = given.clone()
    count_micro_batches(trainer, given, data, _ranks(trainer))
    cli.model.check_settings()
    cli.check_length()
    parts, checkpointing = trainer.accumulate_grad_batches, cli.model.activation_checkpointing
    # --fit_in asks about a GPU, which may not be here.
    known = given.accelerator in ("auto", "cpu") and not cli.config.fit_in
    device = choose_device(given.accelerator) if known else None
    tell_if_slow(cli.model.dtype_name, device)
    tell_what_is_not_written(cli.trainer)
    return Planner(cli.model, device), Step(data.batch_size, data.seq_len, parts, checkpointing), trainer


def _micro_batch_counts(cli: RoICLI) -> dict[str, int]:
    """The options that count micro-batches of the configured size."""
    trainer, counts = cli.config.trainer, {}
    if trainer.accumulate_grad_batches is not None or cli.datamodule.windows_per_step is None:
        counts["--trainer.accumulate_grad_batches"] = trainer.accumulate_grad_batches or 1
    if type(trainer.val_check_interval) is int:
        counts["--trainer.val_check_interval"] = trainer.val_check_interval
    return counts


def _count(planner: Planner, step: Step, trainer: Any) -> dict[str, Any]:
    ranks = _ranks(trainer)
    windows = step.accumulate * step.batch_size * ranks
    every = trainer.val_check_interval
    sizes = planner.sizes(step)
    # A CPU's allocator rarely gives back what one part had before another needs memory. Besides, this process has
    # loaded what a run loads, and nothing large.
    sizes["process"] = sum(sizes.values()) - sizes["total"] + peak_memory(torch.device("cpu"))
    return {
        "model": planner.learner.source.spec,
        "pattern": str(planner.chosen.pattern),
        "layers": planner.layers,
        "prunable": planner.prunable,
        "kept": planner.chosen.kept,
        "logits": planner.learned,
        "bytes": sizes,
        "steps": trainer.max_steps,
        "windows_per_step": windows,
        "micro_batches": step.accumulate,
        "tokens_per_step": windows * step.seq_len,
        "tokens": trainer.max_steps * windows * step.seq_len,
        "validate_every_steps": every / step.accumulate if type(every) is int else None,
        "devices": ranks,
        "spread": round(planner.held(sharded=True) / ranks) if _is_sharded(trainer.strategy) else None,
    }


def _is_sharded(strategy: Any) -> bool:
    """Whether a setting names the strategy that shards a model over devices."""
    module, _, name = getattr(strategy, "class_path", "").rpartition(".")
    return bool(module) and issubclass(getattr(import_module(module), name), FSDP2Strategy)


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


def show_plan(plan: dict[str, Any], learner: MaskLearningModule) -> None:
    """Print the plan as a table."""
    learns, kept = learner.learns, ", kept for the backward pass" if learner.differentiates else ""
    share = f"{plan['kept']:,}, {plan['kept'] / plan['prunable']:.1%}, mixed patterns"
    rows: list[list[str] | None] = [
        ["prunable weights", f"{plan['prunable']:,} in {plan['layers']} layers"],
        *([["of them kept", share]] if is_mixed(plan["pattern"]) else []),
        [f"{learns} to learn", f"{plan['logits']:,}"],
        None,
        *(
            [_LABELS[name].format(learns=learns, kept=kept), f"{size / 2**30:,.2f} GiB"]
            for name, size in plan["bytes"].items()
        ),
        None,
        ["optimizer steps", f"{plan['steps']:,}"],
        ["windows per step", f"{plan['windows_per_step']:,}"],
        ["tokens per step", f"{plan['tokens_per_step']:,}"],
        ["devices counted", f"{plan['devices']}"],
        ["micro-batches per step on each", f"{plan['micro_batches']:,}"],
    ]
    if plan["validate_every_steps"] is not None:
        rows.append(["steps between validations", f"{plan['validate_every_steps']:,g}"])
    if plan["spread"] is not None:
        rows.append(["the first four, sharded", f"{plan['spread'] / 2**30:,.2f} GiB each"])
    rows.append(["tokens", f"{plan['tokens']:,}"])
    print_table(["", ""], rows, f"{plan['model']} at {plan['pattern']}")
