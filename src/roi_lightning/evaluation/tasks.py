"""What `evaluate` can measure, by the names of `--tasks`, and its options."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.corpora import Corpus, as_corpora, parse_corpus
from roi_lightning.data.packing import find_bos
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.evaluation.perplexity import Cut
from roi_lightning.evaluation.registry import SUFFIXES, check_name, name_in, without_harness
from roi_lightning.utils.extras import require


@dataclass(frozen=True)
class Task:
    """One measurement, or a group of them that has figures of its own.

    Attributes:
        name: As given to `--tasks` and as a key in JSON; of a YAML file, the name in it.
        label: The head of its column.
        kind: Token perplexity over windows, word perplexity over documents, accuracy over questions, or whatever the
            harness measures.
        definition: What the harness opens: one of its names, or a YAML file's absolute path.
        shown: Of kind `harness`: the metrics that are columns, and whether higher is better.
    """

    name: str
    label: str
    kind: Literal["windows", "documents", "questions", "harness"]
    definition: str = ""
    shown: Mapping[str, bool] = field(default_factory=dict)


PROTOCOL_2048: Final = "token_perplexity_2048"
# In the order of the paper's tables; definitions relative to the harness' folder of tasks.
TASKS: Final = {
    task.name: task
    for task in (
        Task("token_perplexity", "token PPL", "windows"),
        Task(PROTOCOL_2048, "2048 PPL", "windows"),
        Task("word_perplexity", "word PPL", "documents", "wikitext/wikitext.yaml"),
        Task("arc_challenge", "ARC-C", "questions", "arc/arc_challenge.yaml"),
        Task("arc_easy", "ARC-E", "questions", "arc/arc_easy.yaml"),
        Task("boolq", "BoolQ", "questions", "super_glue/boolq/default.yaml"),
        Task("hellaswag", "HellaS.", "questions", "hellaswag/hellaswag.yaml"),
        Task("piqa", "PIQA", "questions", "piqa/piqa.yaml"),
        Task("race", "RACE", "questions", "race/race.yaml"),
        Task("sciq", "SciQ", "questions", "sciq/sciq.yaml"),
    )
}


def choose_tasks(names: str) -> list[Task]:
    """The tasks of a comma-separated list: those of the table in its order, then the others as they come.

    Raises:
        UserError: For a name that neither this package nor the harness knows, with the nearest known ones, for a YAML
            file that can't be read, an empty list, or a task that needs software that is missing.
    """
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not wanted:
        raise UserError(
            f"--tasks is empty; name some of {', '.join(TASKS)}, or tasks of lm-evaluation-harness"
        )
    tasks = [task for name, task in TASKS.items() if name in wanted]
    tasks += [_other(name) for name in wanted if name not in TASKS]
    for task in tasks:
        if task.kind != "windows":
            require("eval", f"task {task.name!r}")
        if [other.name for other in tasks].count(task.name) > 1:
            raise UserError(f"--tasks: two are called {task.name!r}; leave one out or rename it in its file")
    return tasks


def _other(name: str) -> Task:
    if importlib.util.find_spec("lm_eval") is None:
        raise without_harness(name, list(TASKS))
    if not name.endswith(SUFFIXES):
        check_name(name, list(TASKS))
        return Task(name, name, "harness", name)
    file = Path(name).expanduser().absolute()
    given = name_in(file)
    if given in TASKS:
        raise UserError(f"--tasks: {name!r} calls its task {given!r}, which means another here; rename it")
    return Task(given, given, "harness", str(file))


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to measure, and on what.

    Attributes:
        tasks: Names with commas between them, or a sequence of names: token_perplexity, token_perplexity_2048,
            word_perplexity, arc_challenge, arc_easy, boolq, hellaswag, piqa, race, sciq; any other task, group or
            tag of lm-evaluation-harness; a task's YAML file.
        text: File for the token perplexities, or a mapping as of data.corpora, such as '{source: x.jsonl,
            messages_field: messages, loss_on: answers}' for chats; without one WikiText-2 from the hub.
        task_data: Folder of <task>.jsonl files for the other tasks (wikitext.jsonl for word_perplexity), and of
            <task>.<split>.jsonl for their examples; without one the hub.
        num_fewshot: Solved examples before every question; without it none for the tasks named above and each other
            task's own number.
        apply_chat_template: Ask as a chat, with the model's own template.
        system_instruction: Text that opens every prompt, in a chat the system's message.
        seq_len: Tokens per window of token_perplexity, BOS included.
        limit: Only the first so many windows, documents and questions of each task; below 1 a fraction of them.
        batch_size: Sequences per forward pass.

    Raises:
        UserError: For numbers that make no sense, and tasks that are unknown or lack their software.
    """

    tasks: str | Sequence[str] = "token_perplexity"
    text: str | Path | None = None
    task_data: Path | str | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    seq_len: int = 1024
    limit: float | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        check_at_least(self, seq_len=2, batch_size=1, num_fewshot=0)
        if self.limit is not None and (self.limit <= 0 or (self.limit > 1 and self.limit % 1)):
            raise UserError(f"--limit {self.limit:g}: give a whole number, or a fraction between 0 and 1")
        if (
            self.corpus
            and self.corpus.messages_field
            and PROTOCOL_2048 in [task.name for task in self.chosen]
        ):
            raise UserError(f"{PROTOCOL_2048} is defined for texts, and --text holds chats; leave one out")
        _ = self.chosen

    @cached_property
    def corpus(self) -> Corpus | None:
        """The text, None for WikiText-2.

        Raises:
            UserError: If it is neither a file nor a mapping that describes a corpus, or has a weight.
        """
        if self.text is None:
            return None
        if str(self.text).startswith("{"):
            corpus = as_corpora([parse_corpus(str(self.text))])[0]
            if corpus.weight != 1:
                raise UserError(f"weight {corpus.weight:g} of --text means nothing to one text; leave it out")
            return corpus
        if not Path(self.text).is_file():
            raise UserError(f"--text {str(self.text)!r} is no file; give a text file")
        return Corpus(str(self.text))

    @cached_property
    def chosen(self) -> list[Task]:
        """The tasks, as `choose_tasks` has them."""
        return choose_tasks(self.tasks if isinstance(self.tasks, str) else ",".join(self.tasks))

    @property
    def harness_tasks(self) -> list[Task]:
        """Those that lm-evaluation-harness defines."""
        return [task for task in self.chosen if task.kind != "windows"]

    @property
    def first(self) -> float | None:
        """The limit as the harness takes it: a number from 1 on is whole."""
        return int(self.limit) if self.limit is not None and self.limit >= 1 else self.limit

    def cut(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> Cut:
        """How a text becomes the windows of a token perplexity.

        Every window begins with the BOS that the tokenizer puts before a text, in Wanda's protocol only the first.
        """
        if task.name == PROTOCOL_2048:
            return Cut(2048, keep_tail=False, limit=self.first)
        return Cut(self.seq_len, limit=self.first, bos=find_bos(tokenizer))
