"""lm-evaluation-harness: its tasks on local files or from the hub, run quietly on our scorer."""

import functools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.corpora import uncounted
from roi_lightning.errors import UserError
from roi_lightning.evaluation.tasks import Task

Metrics = float | dict[str, float | int]


def open_tasks(tasks: Sequence[Task], data: Path | str | None) -> dict[str, Any]:
    """Read the questions and documents of every task; a first one is put together on trial.

    Args:
        tasks: Harness tasks.
        data: Folder with `<task>.jsonl` (`wikitext.jsonl` for the word perplexity); None for the hub.

    Returns:
        The harness' task objects by task name.

    Raises:
        UserError: If the data of a task can't be had or have other fields than the task needs.
    """
    if not tasks:
        return {}
    from lm_eval.tasks import TaskManager

    with quiet(), TemporaryDirectory() as folder:
        manager = TaskManager(include_defaults=False)
        local = None if data is None else Path(data)
        return {task.name: _open(manager, task, local, Path(folder)) for task in tasks}


def _open(manager: Any, task: Task, data: Path | None, folder: Path) -> Any:
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent / task.stock
    definition = stock if data is None else _localised(task, stock, data, folder)
    try:
        (opened,) = manager.load([str(definition)])["tasks"].values()
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise UserError(
            f"task {task.name!r} can't be set up from {_origin(task, data)} ({reason})"
        ) from error
    opened.set_config(key="num_fewshot", value=0)
    return opened


def _origin(task: Task, data: Path | None) -> str:
    if data is None:
        return "the hub; check the network, or give local files with --task_data"
    return f"{str(data / task.data_file)!r}; check its fields against the harness' task"


def _localised(task: Task, stock: Path, data: Path, folder: Path) -> Path:
    """The stock definition with its data read from a local file.

    It goes through `include`, by which the stock file's own helper functions are still found.
    """
    splits = {f"{split}_split": None for split in ("training", "validation", "test", "fewshot")}
    definition = splits | {
        "include": str(stock),
        "task": task.name,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {task.split: str((data / task.data_file).resolve())}},
        f"{task.split}_split": task.split,
    }
    file = folder / f"{task.name}.yaml"
    file.write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML
    return file


def run_task(
    task: Task,
    opened: Any,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    batch_size: int,
    limit: int | None,
    description: str,
) -> Metrics:
    """Measure one task on one model.

    Args:
        task: Which.
        opened: The same from `open_tasks`; it may be used again for other models.
        lm: The model on its device.
        tokenizer: Its own.
        max_length: Tokens the model reads at once; None leaves it to the harness.
        batch_size: Sequences per forward pass.
        limit: The first so many documents or questions; None for all.
        description: For the progress report.

    Returns:
        The word perplexity, or `acc` and, where the task has it, `acc_norm` with their standard errors
        (fractions of 1) and the number of `samples`.
    """
    from roi_lightning.evaluation.harness_model import SlicedHFLM

    with quiet():
        model = SlicedHFLM(lm, tokenizer, max_length, batch_size, description)
        try:
            return _figures(task, opened, model, limit)
        except OverflowError:  # the harness takes exp of whatever a ruined model needs per word
            return math.inf


def _figures(task: Task, opened: Any, model: Any, limit: int | None) -> Metrics:
    from lm_eval.evaluator import evaluate

    # One bootstrap iteration means none, but standard errors that have a closed form.
    tasks = {"tasks": {task.name: opened}, "groups": {}}
    found = evaluate(lm=model, task_dict=tasks, limit=limit, bootstrap_iters=1, log_samples=False)
    metrics = found["results"][task.name]
    if task.kind == "documents":
        return float(metrics["word_perplexity,none"])
    names = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    numbers = {name: metrics.get(f"{name},none") for name in names}
    kept = {name: float(x) for name, x in numbers.items() if isinstance(x, int | float)}
    return kept | {"samples": int(found["n-samples"][task.name]["effective"])}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the harness' log and bars, those of `datasets`, and its counting of local files at a server."""
    import datasets
    import lm_eval.api.task

    logger, bars = logging.getLogger("lm_eval"), not datasets.are_progress_bars_disabled()
    module, no_bar = lm_eval.api.task, functools.partial(lm_eval.api.task.tqdm, disable=True)
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with _changed(module, "tqdm", no_bar), uncounted():
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _changed(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
