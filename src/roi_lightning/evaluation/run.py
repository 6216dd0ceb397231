"""Measure several models on several tasks: everything checked first, then one model in memory at a time."""

import gc
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.evaluation.harness import Figures, open_tasks, run_task
from roi_lightning.evaluation.settings import Settings
from roi_lightning.evaluation.subjects import Subject
from roi_lightning.evaluation.tasks import PROTOCOL_2048, Task, harness_tasks
from roi_lightning.evaluation.terminal import shorten
from roi_lightning.evaluation.text import encode_text, read_joined_rows, read_text
from roi_lightning.evaluation.windows import Cut, token_perplexity

Results = dict[str, dict[str, Figures]]


def evaluate_models(subjects: Sequence[Subject], settings: Settings) -> Results:
    """All figures of all models.

    Args:
        subjects: From `resolve_subjects`.
        settings: Checked (`Settings.check`).

    Returns:
        By model, by task: a perplexity, or accuracies as fractions of 1 (`run_task`).

    Raises:
        UserError: If the text or a task's data can't be had, or a model is too short for a window, all
            before a model is loaded; or if a model can't be read.
    """
    bench = _Bench(subjects, settings)
    return {subject.name: bench.evaluate(subject) for subject in subjects}


class _Bench:
    """Everything that is measured on, read and checked.

    Attributes:
        texts: By model and task, the text in the model's tokens, int64 [tokens], and how it becomes windows.
        opened: By task, the harness' questions or documents.
    """

    def __init__(self, subjects: Sequence[Subject], settings: Settings) -> None:
        self.settings = settings
        tasks = [task for task in settings.tasks if task.kind == "windows"]
        for subject, task in product(subjects, tasks):
            self._check_length(subject, task)
        self.texts: dict[tuple[str, str], tuple[Tensor, Cut]] = {}
        for task in tasks:
            text = read_joined_rows(settings.text) if task.name == PROTOCOL_2048 else read_text(settings.text)
            self.texts |= {
                (subject.name, task.name): self._encode(subject, task, text) for subject in subjects
            }
        self.opened = open_tasks(harness_tasks(settings.tasks), settings.task_data)
        for subject in subjects:
            subject.check_weights()

    def _check_length(self, subject: Subject, task: Task) -> None:
        length = self.settings.cut(task, subject.tokenizer).length
        if length > (subject.max_positions or length):
            remedy = "lower --seq_len" if task.name == "token_perplexity" else "leave it out"
            raise UserError(
                f"model {subject.name!r} reads at most {subject.max_positions} tokens and the windows of "
                f"{task.name} have {length}; {remedy}"
            )

    def _encode(self, subject: Subject, task: Task, text: str) -> tuple[Tensor, Cut]:
        cut = self.settings.cut(task, subject.tokenizer)
        ids = encode_text(subject.tokenizer, text, cut)
        cut.check(len(ids))
        return ids, cut

    def evaluate(self, subject: Subject) -> dict[str, Figures]:
        """Load a model, measure it, and let go of it."""
        settings = self.settings
        lm = subject.load(settings.dtype, settings.device, settings.trust_remote_code)
        figures = {task.name: self._measure(subject, lm, task) for task in settings.tasks}
        del lm
        gc.collect()  # a model's modules refer to each other in circles
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
        return figures

    def _measure(self, subject: Subject, lm: PreTrainedModel, task: Task) -> Figures:
        batch_size, description = self.settings.batch_size, f"{shorten(subject.name, 32)}: {task.name}"
        if task.kind == "windows":
            ids, cut = self.texts[subject.name, task.name]
            return token_perplexity(lm, ids, cut, batch_size, description)
        return run_task(
            task,
            self.opened[task.name],
            lm,
            subject.tokenizer,
            max_length=subject.word_length if task.kind == "documents" else None,
            batch_size=batch_size,
            limit=self.settings.limit,
            description=description,
        )
