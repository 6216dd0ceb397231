"""Measure several models on several tasks: everything checked first, then one model in memory at a time."""

import gc
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError
from roi_lightning.evaluation.harness import Metrics, open_tasks, run_task
from roi_lightning.evaluation.models import EvaluatedModel
from roi_lightning.evaluation.perplexity import read_text, token_perplexity
from roi_lightning.evaluation.tasks import PROTOCOL_2048, EvalConfig, Task
from roi_lightning.utils.progress import progress

Results = dict[str, dict[str, Metrics]]


def evaluate_models(
    models: Sequence[EvaluatedModel], config: EvalConfig, load: Callable[[EvaluatedModel], PreTrainedModel]
) -> Results:
    """All metrics of all models.

    Args:
        models: From `resolve_models`.
        config: What to measure.
        load: Gives a model on its device, in eval mode.

    Returns:
        By model, by task: a perplexity, or accuracies as fractions of 1 (`run_task`).

    Raises:
        UserError: If the text or a task's data can't be had, or a model is too short for a window, all
            before a model is loaded; or if a model can't be read.
    """
    evaluation = _Evaluation(models, config)
    results = {}
    for model in models:
        lm = load(model)
        results[model.name] = {task.name: evaluation.measure(model, lm, task) for task in config.chosen}
        del lm
        gc.collect()  # a model's modules refer to each other in circles
        torch.cuda.empty_cache()
    return results


class _Evaluation:
    """Everything that is measured on, read and checked.

    Attributes:
        batches: By model and task, the text as windows of the model's tokens.
        opened: By task, the harness' questions or documents.
    """

    def __init__(self, models: Sequence[EvaluatedModel], config: EvalConfig) -> None:
        self.config = config
        pairs = list(product(models, [task for task in config.chosen if task.kind == "windows"]))
        for model, task in pairs:
            self._check_length(model, task)
        self.batches: dict[tuple[str, str], list[Tensor]] = {}
        if pairs:
            text = read_text(config.text)
            for model, task in pairs:
                cut = config.cut(task, model.tokenizer)
                ids = cut.encode(model.tokenizer, text.rows if task.name == PROTOCOL_2048 else text.whole)
                self.batches[model.name, task.name] = cut.batches(ids, config.batch_size)
        self.opened = open_tasks(config.harness_tasks, config.task_data)
        for model in models:
            model.check_weights()

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
            return token_perplexity(lm, progress(self.batches[model.name, task.name], description))
        return run_task(
            task,
            self.opened[task.name],
            lm,
            model.tokenizer,
            max_length=model.word_length if task.kind == "documents" else None,
            batch_size=self.config.batch_size,
            limit=self.config.limit,
            description=description,
        )


def shorten(name: str, width: int) -> str:
    """A name cut on the left: the end of a path is what tells it from others."""
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]
