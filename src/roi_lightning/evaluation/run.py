"""Measure several models on several tasks: everything checked first, then one model in memory at a time."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data.packing import as_batch
from roi_lightning.errors import UserError
from roi_lightning.evaluation.harness import Metrics, OpenedTask, open_tasks, run_task
from roi_lightning.evaluation.models import EvaluatedModel
from roi_lightning.evaluation.perplexity import EvalChats, EvalText, read_text, token_perplexity
from roi_lightning.evaluation.tasks import PROTOCOL_2048, EvalConfig, Task
from roi_lightning.utils.progress import progress


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        results: By model, by task: a perplexity, or figures by name (`run_task`).
        tasks: Which have their own figures; members of a tag, and of a task group without any, instead of it.
        protocol: By name, how lm-evaluation-harness' tasks asked: the number of examples and the version.
    """

    results: dict[str, dict[str, Metrics]]
    tasks: list[Task]
    protocol: dict[str, dict[str, Any]]


def evaluate_models(
    models: Sequence[EvaluatedModel], config: EvalConfig, load: Callable[[EvaluatedModel], PreTrainedModel]
) -> Evaluation:
    """All metrics of all models.

    Args:
        models: From `resolve_models`.
        config: What to measure.
        load: Gives a model on its device, in eval mode.

    Raises:
        UserError: If the text or a task's data can't be had, or a model is too short for a window or an answer or has
            no chat template where one is needed, all before a model is loaded; or if a model can't be read.
    """
    prepared = _Prepared(models, config)
    results = {}
    for model in models:
        lm = load(model)
        results[model.name] = {task.name: prepared.measure(model, lm, task) for task in prepared.tasks}
        del lm
        gc.collect()  # a model's modules refer to each other in circles
        torch.cuda.empty_cache()
    protocol = {name: how for opened in prepared.opened.values() for name, how in opened.protocol.items()}
    return Evaluation(results, prepared.tasks, protocol)


class _Prepared:
    """Everything that is measured on, read and checked.

    Attributes:
        batches: By model and task, the text as windows of the model's tokens, as the model takes them (`as_batch`).
        opened: By task, the harness' questions or documents.
        tasks: All, in the order of the columns.
    """

    def __init__(self, models: Sequence[EvaluatedModel], config: EvalConfig) -> None:
        self.config = config
        pairs = list(product(models, [task for task in config.chosen if task.kind == "windows"]))
        for model, task in pairs:
            self._check_length(model, task)
        self.batches: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
        if pairs:
            text = read_text(config.corpus)
            for model, task in pairs:
                self.batches[model.name, task.name] = self._windows(model, task, text)
        for model in models:
            self._check_chat(model)
        self.opened = open_tasks(config.harness_tasks, config.task_data, config.num_fewshot)
        for model, opened in product(models, self.opened.values()):
            self._check_answers(model, opened)
        windows = [task for task in config.chosen if task.kind == "windows"]
        self.tasks = [*windows, *(opened.task for opened in self.opened.values())]
        for model in models:
            model.check_weights()

    def _windows(
        self, model: EvaluatedModel, task: Task, text: EvalText | EvalChats
    ) -> list[dict[str, Tensor]]:
        cut = self.config.cut(task, model.tokenizer)
        if isinstance(text, EvalChats):
            ids = text.encode(model.tokenizer)
        else:
            ids = cut.encode(model.tokenizer, text.rows if task.name == PROTOCOL_2048 else text.whole)
        counted = [batch for batch in cut.batches(ids, self.config.batch_size) if (batch[:, 1:] >= 0).any()]
        if not counted:
            raise UserError(f"the first windows of {self.config.text} hold no answer; raise --limit")
        return [as_batch(batch) for batch in counted]

    def _check_chat(self, model: EvaluatedModel) -> None:
        if self.config.apply_chat_template and getattr(model.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"model {model.name!r}: its tokenizer has no chat template; leave out --apply_chat_template"
            )

    def _check_answers(self, model: EvaluatedModel, opened: OpenedTask) -> None:
        limit, wanted = model.max_positions, opened.longest_answer
        if limit is not None and wanted >= limit:
            raise UserError(
                f"model {model.name!r} reads at most {limit} tokens and the answers of {opened.task.name} may have "
                f"{wanted}; leave it out"
            )

    def _check_length(self, model: EvaluatedModel, task: Task) -> None:
        length = self.config.cut(task, model.tokenizer).length
        if length > (model.max_positions or length):
            remedy = "lower --seq_len" if task.name == "token_perplexity" else "leave it out"
            raise UserError(
                f"model {model.name!r} reads at most {model.max_positions} tokens and the windows of "
                f"{task.name} have {length}; {remedy}"
            )

    def measure(self, model: EvaluatedModel, lm: PreTrainedModel, task: Task) -> Metrics:
        """One model, loaded, on one task."""
        description = f"{shorten(model.name, 32)}: {task.name}"
        if task.kind == "windows":
            batches = self.batches[model.name, task.name]
            windows = progress([batch["input_ids"] for batch in batches], description)
            return token_perplexity(lm, windows, [batch.get("labels") for batch in batches])
        return run_task(
            self.opened[task.name],
            lm,
            model.tokenizer,
            self.config,
            max_length=model.word_length if task.kind == "documents" else None,
            description=description,
        )


def shorten(name: str, width: int) -> str:
    """A name cut on the left: the end of a path is what tells it from others."""
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]
