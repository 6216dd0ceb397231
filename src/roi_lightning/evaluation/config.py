"""What `evaluate` measures: its options, and the names of its perplexities and zero-shot tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from roi_lightning.errors import UserError, check_at_least, require

if TYPE_CHECKING:
    from roi_lightning.data.corpora import Corpus

PROTOCOL_2048: Final = "token_perplexity_2048"
WORDS: Final = "word_perplexity"
# In the order of the paper's tables, with the heads of their columns.
PERPLEXITIES: Final = {"token_perplexity": "token PPL", PROTOCOL_2048: "2048 PPL", WORDS: "word PPL"}
ZERO_SHOT: Final = {
    "arc_challenge": "ARC-C",
    "arc_easy": "ARC-E",
    "boolq": "BoolQ",
    "hellaswag": "HellaS.",
    "piqa": "PIQA",
    "race": "RACE",
    "sciq": "SciQ",
}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to measure, and on what.

    Attributes:
        tasks: Names with commas between them, or a sequence of names: token_perplexity, token_perplexity_2048,
            word_perplexity, arc_challenge, arc_easy, boolq, hellaswag, piqa, race, sciq; any other task, group or
            tag of lm-evaluation-harness; a task's YAML file.
        text: File for the token perplexities, or a mapping as in data.corpora, such as '{source: x.jsonl,
            messages_field: messages, loss_on: answers}' for chats. If left out: WikiText-2 from the hub.
        task_data: Folder with a file <task>.jsonl for each other task (wikitext.jsonl for word_perplexity), and
            <task>.train.jsonl for its examples. If left out, tasks are read from the hub.
        num_fewshot: Number of solved examples before every question; if left out, the task's own number.
        apply_chat_template: Ask as a chat, with the model's own template.
        system_instruction: Text that opens every prompt; in a chat it is the system's message.
        seq_len: Tokens per window of token_perplexity, BOS included.
        limit: Measure only the first N windows, documents or questions of each task; below 1, this fraction of them.
        batch_size: Sequences per forward pass.

    Raises:
        UserError: For numbers that make no sense, and tasks that lack their software.
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
        if not self.names:
            raise UserError(f"--tasks is empty; name some of {', '.join(PERPLEXITIES | ZERO_SHOT)}")
        if self.corpus and self.corpus.messages_field and PROTOCOL_2048 in self.names:
            raise UserError(f"{PROTOCOL_2048} is defined for texts, and --text holds chats; leave one out")
        for name in self.names:
            if name not in PERPLEXITIES or name == WORDS:
                require("eval", f"task {name!r}")

    @property
    def names(self) -> list[str]:
        """The tasks: those of the tables in their order, then the others as they come."""
        words = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks
        order = [*PERPLEXITIES, *ZERO_SHOT]
        names = dict.fromkeys(name.strip() for name in words if name.strip())
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    @property
    def harness_names(self) -> list[str]:
        """Those that lm-evaluation-harness measures, except the word perplexity."""
        return [name for name in self.names if name not in PERPLEXITIES]

    @property
    def corpus(self) -> "Corpus | None":
        """The text, None for WikiText-2."""
        if self.text is None:
            return None
        from roi_lightning.data.corpora import as_corpora  # which imports Lightning

        return as_corpora(str(self.text))[0]

    @property
    def first(self) -> float | None:
        """The limit as the harness takes it: a number from 1 on is whole."""
        return int(self.limit) if self.limit is not None and self.limit >= 1 else self.limit
