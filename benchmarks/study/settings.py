"""How a cell becomes the command line of `fit` and the configuration that comes last on it."""

import math
from pathlib import Path
from typing import Any

from benchmarks.study.cells import Cell, Study


def fit_arguments(cell: Cell, folder: Path) -> list[str]:
    """What follows `fit`; `folder/cell.yaml` holds the settings."""
    shared = ["--config", "quickstart.yaml", "--config", "overlays/small_budget.yaml"]
    return [*shared, *cell.method.arguments, "--config", str(folder / "cell.yaml")]


def fit_settings(study: Study, cell: Cell) -> dict[str, Any]:
    """What a study decides for all methods alike, as a configuration that comes last."""
    steps = study.steps(cell.tokens)
    interval = steps // points_within(steps, study.points)
    folder = str(study.folder(cell))
    return {
        "seed_everything": cell.seed,
        "model": {"init_args": _model(study, cell, str(study.prior(cell.pattern)))},
        "data": study.data(cell.method),
        "trainer": {
            "max_steps": steps,
            "validate_every_steps": interval,
            "num_sanity_val_steps": 0,
            "default_root_dir": folder,
            "logger": _logger(folder),
            "callbacks": [
                _record(study.folder(cell)),
                *_callbacks(interval, checkpoint_steps(steps, interval)),
            ],
        },
    }


def cost_settings(study: Study, cell: Cell, folder: Path) -> dict[str, Any]:
    """Steps and nothing else: no prior to make, no validation, no file but the record."""
    return {
        "seed_everything": cell.seed,
        "model": {"init_args": _model(study, cell, "none")},
        "data": study.data(cell.method),
        "trainer": {
            "max_steps": study.steps(cell.tokens),
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": False,
            "default_root_dir": str(folder),
            "logger": False,
            "callbacks": [_record(folder)],
        },
    }


def points_within(steps: int, wanted: int) -> int:
    """The number of validations nearest to the wanted one that lets the last of them fall on the last step."""
    divisors = (n for n in range(1, steps + 1) if steps % n == 0)
    return min(divisors, key=lambda n: (abs(math.log(n / wanted)), -n))


def checkpoint_steps(steps: int, interval: int) -> int:
    """Steps between checkpoints: about a quarter of the run, and none at a step with a validation if that can be.

    A run that resumes from a checkpoint at the step of a validation does that validation again.
    """
    wanted = max(1, steps // 4)
    apart = (n for n in range(1, steps + 1) if math.lcm(n, interval) > steps)
    return min(apart, key=lambda n: abs(n - wanted), default=wanted)


def _record(folder: Path) -> dict[str, Any]:
    """The callback that notes times and held-out perplexities."""
    return {
        "class_path": "benchmarks.study.record.RunRecord",
        "init_args": {"path": str(folder / "steps.jsonl")},
    }


def _model(study: Study, cell: Cell, prior: str) -> dict[str, Any]:
    start = {"prior": prior} if cell.method.prior else {}
    return {"lm": study.lm, "pattern": cell.pattern, **start}


def _logger(folder: str) -> dict[str, Any]:
    options = {"save_dir": folder, "name": "", "version": "", "flush_logs_every_n_steps": 10}
    return {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": options}


def _callbacks(mask_steps: int, checkpoint_steps: int) -> list[dict[str, Any]]:
    newest = {"save_top_k": 1, "save_last": "link", "monitor": None}
    return [
        {"class_path": "HardenMasks", "init_args": {"every_n_steps": mask_steps}},
        {"class_path": "SparseExport"},
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"every_n_train_steps": checkpoint_steps, **newest},
        },
    ]
