"""What `evaluate` can measure, by the names of `--tasks`, and its options."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.packing import find_bos
from roi_lightning.errors import UserError, did_you_mean
from roi_lightning.evaluation.perplexity import Cut
from roi_lightning.utils.extras import require


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
            known = ", ".join(TASKS)
            raise UserError(
                f"--tasks: there is no task {name!r}{did_you_mean(name, TASKS) or ';'} the tasks are {known}"
            )
    if not wanted:
        raise UserError(f"--tasks is empty; name some of {', '.join(TASKS)}")
    return [task for name, task in TASKS.items() if name in wanted]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to measure, and on what.

    Attributes:
        tasks: Names with commas between them, or a sequence of names: token_perplexity, token_perplexity_2048,
            word_perplexity, arc_challenge, arc_easy, boolq, hellaswag, piqa, race, sciq.
        text: File for the token perplexities; without one WikiText-2 from the hub.
        task_data: Folder of <task>.jsonl files for the other tasks (wikitext.jsonl for word_perplexity); without one
            the hub.
        seq_len: Tokens per window of token_perplexity, BOS included.
        limit: Only the first so many windows, documents and questions.
        batch_size: Sequences per forward pass.

    Raises:
        UserError: For numbers that make no sense, and tasks that are unknown or lack their software or files.
    """

    tasks: str | Sequence[str] = "token_perplexity"
    text: Path | str | None = None
    task_data: Path | str | None = None
    seq_len: int = 1024
    limit: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name, minimum in (("seq_len", 2), ("batch_size", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UserError(f"--{name} {value} is too small; give at least {minimum}")
        if self.text is not None and not Path(self.text).is_file():
            raise UserError(f"--text {str(self.text)!r} is no file; give a text file")
        for task in self.harness_tasks:
            self._check_harness(task)

    @cached_property
    def chosen(self) -> list[Task]:
        """The tasks, in the order of the table."""
        return choose_tasks(self.tasks if isinstance(self.tasks, str) else ",".join(self.tasks))

    @property
    def kinds(self) -> set[str]:
        """The kinds of task among them."""
        return {task.kind for task in self.chosen}

    @property
    def harness_tasks(self) -> list[Task]:
        """Those that lm-evaluation-harness defines."""
        return [task for task in self.chosen if task.kind != "windows"]

    def _check_harness(self, task: Task) -> None:
        require("eval", f"task {task.name!r}")
        file = None if self.task_data is None else Path(self.task_data) / task.data_file
        if file is not None and not file.is_file():
            raise UserError(
                f"task {task.name!r}: no file {str(file)!r} in --task_data; give a folder with it"
            )

    def cut(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> Cut:
        """How a text becomes the windows of a token perplexity.

        Every window begins with the BOS that the tokenizer puts before a text, in Wanda's protocol only the first.
        """
        if task.name == PROTOCOL_2048:
            return Cut(2048, keep_tail=False, limit=self.limit)
        return Cut(self.seq_len, limit=self.limit, bos=find_bos(tokenizer))
