"""What learned masks are held against: the dense model, and the prior that all methods of a pattern start from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.cells import Cell, Study, in_folders
from benchmarks.study.evaluate import evaluate, evaluation, measured
from benchmarks.study.work import claim, read_json, result_of, run_commands
from roi_lightning.utils.atomic_io import write_json


@dataclass(frozen=True)
class _Reference:
    """A model to measure, and the commands that make it."""

    folder: Path
    model: str
    made_by: list[list[str]]

    def commands(self, study: Study) -> list[list[str]]:
        """What is left to do."""
        missing = [] if Path(self.model).exists() else self.made_by
        if result_of(self.folder) is not None:
            return missing
        windows = json.dumps(study.data() | {"tokenizer": study.lm})
        held_out = ["held_out", self.model, windows, str(self.folder / "held_out.json")]
        return [*missing, held_out, *evaluate(study, self.model, self.folder)]

    def recipe(self, study: Study) -> dict[str, Any]:
        """All that its results depend on."""
        recipe = {
            "model": self.model,
            "made_by": self.made_by,
            "data": study.data(),
            "evaluation": evaluation(study),
        }
        return {key: study.portable(value) for key, value in recipe.items()}


def reference_names(cells: Sequence[Cell]) -> list[str]:
    """The folders of what the cells are held against, below the study's."""
    priors = (f"references/prior-{in_folders(cell.pattern)}" for cell in cells)
    return list(dict.fromkeys(["references/dense", *priors]))


def run_references(study: Study, patterns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Make the priors, measure them and the dense model, unless that was done.

    Returns:
        Results by pattern, and of the dense model as `dense`.

    Raises:
        WorkFailed: If a command fails.
    """
    jobs = {"dense": _Reference(study.out / "references/dense", study.lm, [])}
    for pattern in patterns:
        folder = study.out / "references" / f"prior-{in_folders(pattern)}"
        jobs[pattern] = _Reference(folder, str(study.prior(pattern)), [_prune(study, pattern)])
    for job in jobs.values():
        claim(job.folder, job.recipe(study))
    missing = {job.folder: commands for job in jobs.values() if (commands := job.commands(study))}
    if missing:
        run_commands([c for commands in missing.values() for c in commands], study.out / "references/log.txt")
    for folder in (each for each in missing if result_of(each) is None):
        held_out = read_json(folder / "held_out.json")
        write_json(folder / "result.json", measured(study, folder) | {"held_out": held_out})
    return {name: read_json(job.folder / "result.json") for name, job in jobs.items()}


def _prune(study: Study, pattern: str) -> list[str]:
    return [
        *("prune", study.lm, "--method", "wanda", "--activations", "dense", "--pattern", pattern),
        *(
            "--corpora",
            study.train,
            "--windows",
            str(study.prior_windows),
            "--seq_len",
            str(study.prior_seq_len),
        ),
        *("--out", str(study.prior(pattern))),
    ]
