"""What can be measured, by the names of `--tasks`."""

import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from roi_lightning.errors import UserError


@dataclass(frozen=True)
class Task:
    """One measurement.

    Attributes:
        name: As given to `--tasks` and as a key in JSON.
        label: The head of its column.
        kind: Token perplexity over windows, word perplexity over documents, or accuracy over questions.
        stock: lm-evaluation-harness' own definition, relative to its folder of tasks.
        split: The split that is scored.
    """

    name: str
    label: str
    kind: Literal["windows", "documents", "questions"]
    stock: str = ""
    split: Literal["test", "validation"] = "test"

    @property
    def data_file(self) -> str:
        """The name of its file in `--task_data`."""
        return "wikitext.jsonl" if self.kind == "documents" else f"{self.name}.jsonl"


PROTOCOL_2048: Final = "token_perplexity_2048"
# In the order of the paper's tables.
TASKS: Final = {
    task.name: task
    for task in (
        Task("token_perplexity", "token PPL", "windows"),
        Task(PROTOCOL_2048, "2048 PPL", "windows"),
        Task("word_perplexity", "word PPL", "documents", "wikitext/wikitext.yaml"),
        Task("arc_challenge", "ARC-C", "questions", "arc/arc_challenge.yaml"),
        Task("arc_easy", "ARC-E", "questions", "arc/arc_easy.yaml"),
        Task("boolq", "BoolQ", "questions", "super_glue/boolq/default.yaml", "validation"),
        Task("hellaswag", "HellaS.", "questions", "hellaswag/hellaswag.yaml", "validation"),
        Task("piqa", "PIQA", "questions", "piqa/piqa.yaml", "validation"),
        Task("race", "RACE", "questions", "race/race.yaml"),
        Task("sciq", "SciQ", "questions", "sciq/sciq.yaml"),
    )
}


def choose_tasks(names: str) -> list[Task]:
    """The tasks of a comma-separated list, in the order of the table.

    Raises:
        UserError: For an unknown name, with the nearest known ones, or an empty list.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in TASKS:
            near = " or ".join(difflib.get_close_matches(name, TASKS))
            meant = f"did you mean {near}? " if near else ""
            raise UserError(f"--tasks: there is no task {name!r}; {meant}The tasks are {', '.join(TASKS)}")
    if not wanted:
        raise UserError(f"--tasks is empty; name some of {', '.join(TASKS)}")
    return [task for name, task in TASKS.items() if name in wanted]


def harness_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Those that lm-evaluation-harness defines."""
    return [task for task in tasks if task.kind != "windows"]


def check_requirements(tasks: Sequence[Task], data: Path | None) -> None:
    """Refuse tasks whose software or local files are missing; nothing is read.

    Args:
        tasks: What is to be measured.
        data: `--task_data`; None leaves the data to the hub.

    Raises:
        UserError: Naming what is missing.
    """
    needy = harness_tasks(tasks)
    if needy and importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"task {needy[0].name!r} needs lm-evaluation-harness: run `pip install 'roi-lightning[eval]'`"
        )
    for task in needy:
        if data is not None and not (data / task.data_file).is_file():
            raise UserError(
                f"task {task.name!r}: no file {str(data / task.data_file)!r} in --task_data; give a folder with it"
            )
