"""Making one cell of a study: learn, measure, write the result. And a few steps to see what they cost."""

import shutil
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml

from benchmarks.study.cells import Cell, Study
from benchmarks.study.effective import effective
from benchmarks.study.evaluate import evaluate, evaluation, measured
from benchmarks.study.history import curve, step_times
from benchmarks.study.settings import cost_settings, fit_arguments, fit_settings
from benchmarks.study.work import claim, read_json, run_commands
from roi_lightning.utils.atomic_io import write_json

COST_SKIP: Final = 3


def recipe_of(study: Study, cell: Cell) -> dict[str, Any]:
    """All that a cell's result depends on."""
    return {
        "settings": _effective(study, cell, study.folder(cell), fit_settings(study, cell)),
        "evaluation": study.portable(evaluation(study)),
    }


def _effective(study: Study, cell: Cell, folder: Path, settings: dict[str, Any]) -> Any:
    arguments = fit_arguments(cell, folder)[:-2]  # the last two name the file that will hold the settings
    return study.portable(effective(arguments, settings))


def run_cell(study: Study, cell: Cell) -> dict[str, Any]:
    """Learn, measure, write the result; what an earlier call left is used.

    Raises:
        WorkFailed: If a command fails.
    """
    folder, recipe = study.folder(cell), recipe_of(study, cell)
    _begin(folder, recipe, fit_settings(study, cell))
    fitted = read_json(folder / "fit.json") or _fit(cell, folder)
    export, plan = str(folder / "export"), folder / "plan.json"
    commands = [
        ["plan", *fit_arguments(cell, folder), "--json", str(plan)],
        ["differs", export, str(study.prior(cell.pattern)), str(folder / "differs.json")],
        *evaluate(study, export, folder),
    ]
    run_commands(commands, folder / "log.txt")
    result = _result(study, cell, fitted)
    write_json(folder / "result.json", result)
    if not study.keep_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def _fit(cell: Cell, folder: Path) -> dict[str, Any]:
    checkpoint, metrics = folder / "checkpoints/last.ckpt", folder / "metrics.csv"
    resumed = checkpoint.exists()
    resume = ["--ckpt_path", str(checkpoint)] if resumed else ["--overwrite"]
    if not resumed:
        (folder / "steps.jsonl").unlink(missing_ok=True)
    elif metrics.exists():  # the logger of the resumed run would delete it
        metrics.rename(folder / f"metrics-{len(list(folder.glob('metrics-*.csv')))}.csv")
    usage = run_commands([["fit", *fit_arguments(cell, folder), *resume]], folder / "log.txt")
    fitted = {**asdict(usage), "resumed": resumed}
    write_json(folder / "fit.json", fitted)
    return fitted


def _result(study: Study, cell: Cell, fitted: dict[str, Any]) -> dict[str, Any]:
    folder, steps = study.folder(cell), study.steps(cell.tokens)
    plan, record = read_json(folder / "plan.json"), folder / "steps.jsonl"
    times = step_times(record)
    return {
        **identity(cell),
        "steps": steps,
        "arguments": study.portable(["fit", *fit_arguments(cell, folder)]),
        **fitted,
        "seconds_per_step": round(median(times), 4) if times else None,
        "prunable": plan["prunable"],
        "learned": plan["logits"],
        "curve": [[step * cell.tokens // steps, value] for step, value in curve(record).items()],
        **measured(study, folder),
        "differs_from_prior": read_json(folder / "differs.json"),
    }


def identity(cell: Cell) -> dict[str, Any]:
    """Which cell a result is of."""
    return {"method": cell.method.name, "pattern": cell.pattern, "tokens": cell.tokens, "seed": cell.seed}


def cost_recipe(study: Study, cell: Cell, folder: Path) -> dict[str, Any]:
    """All that a measurement of cost depends on."""
    return {"settings": _effective(study, cell, folder, cost_settings(study, cell, folder))}


def run_cost(study: Study, cell: Cell, folder: Path) -> dict[str, Any]:
    """A few steps in a process of their own; their times and its memory.

    Raises:
        WorkFailed: If it fails.
    """
    recipe, record = cost_recipe(study, cell, folder), folder / "steps.jsonl"
    _begin(folder, recipe, cost_settings(study, cell, folder))
    record.unlink(missing_ok=True)
    usage = run_commands([["fit", *fit_arguments(cell, folder), "--overwrite"]], folder / "log.txt")
    times = [round(x, 4) for x in step_times(record, skip=COST_SKIP)]
    result = {**identity(cell), **asdict(usage), "step_seconds": times}
    write_json(folder / "result.json", result)
    return result


def _begin(folder: Path, recipe: dict[str, Any], settings: dict[str, Any]) -> None:
    claim(folder, recipe)
    (folder / "cell.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
