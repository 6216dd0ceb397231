"""How to measure: the options of `evaluate`, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.packing import find_bos
from roi_lightning.errors import UserError
from roi_lightning.evaluation.tasks import PROTOCOL_2048, Task, check_requirements
from roi_lightning.evaluation.windows import Cut
from roi_lightning.language_model import DType

LONG_WINDOW: Final = 2048


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        tasks: What, in the order of the table.
        text: File for the token perplexities; None for WikiText-2 from the hub.
        task_data: Folder for the harness tasks; None for the hub.
        seq_len: Tokens per window of `token_perplexity`, BOS included.
        limit: The first so many windows, documents and questions; None for all.
        batch_size: Sequences per forward pass.
        dtype: Of the weights; `auto` for the stored one.
        device: Where models run.
        trust_remote_code: Let the models' own Python code run.
    """

    tasks: Sequence[Task]
    text: Path | None = None
    task_data: Path | None = None
    seq_len: int = 1024
    limit: int | None = None
    batch_size: int = 8
    dtype: DType = "auto"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse numbers that make no sense, and tasks whose software or files are missing.

        Raises:
            UserError: Naming the value or the file.
        """
        for name, value, least in (
            ("seq_len", self.seq_len, 2),
            ("batch_size", self.batch_size, 1),
            ("limit", self.limit, 1),
        ):
            if value is not None and value < least:
                raise UserError(f"--{name} {value} is too small; give at least {least}")
        if self.text is not None and not self.text.is_file():
            raise UserError(f"--text {str(self.text)!r} is no file; give a text file")
        check_requirements(self.tasks, self.task_data)

    def cut(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> Cut:
        """How a text becomes the windows of a token perplexity.

        Every window begins with the BOS that the tokenizer puts before a text, in Wanda's protocol only the first.
        """
        if task.name == PROTOCOL_2048:
            return Cut(LONG_WINDOW, keep_tail=False, limit=self.limit)
        return Cut(self.seq_len, limit=self.limit, bos=find_bos(tokenizer))
