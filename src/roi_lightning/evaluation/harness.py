"""lm-evaluation-harness: its tasks on local files or from the hub, run quietly on our scorer."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Final

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.errors import UserError, reason
from roi_lightning.evaluation.local_data import DataReader, no_local_data
from roi_lightning.evaluation.quiet import changed, quiet
from roi_lightning.evaluation.registry import load, unsafe
from roi_lightning.evaluation.tasks import TASKS, EvalConfig, Task
from roi_lightning.utils.progress import working

# A perplexity, or figures by name; those of a group's members lie below `subtasks`.
Metrics = float | dict[str, Any]
# What the harness' own program uses where nothing else is asked for.
_SEED: Final = 0
_OTHER_SEED: Final = 1234


@dataclass(frozen=True)
class OpenedTask:
    """A task or group that the harness has read; it may be used for several models.

    Attributes:
        task: What it is in tables and JSON.
        tasks: The harness' objects that ask questions, by name.
        groups: Those that average over them, the outermost first.
    """

    task: Task
    tasks: dict[str, Any]
    groups: dict[str, Any]

    @property
    def outermost(self) -> str:
        """What the harness calls it."""
        return next(iter(self.groups or self.tasks))

    @property
    def longest_answer(self) -> int:
        """The most tokens that a model writes; 0 if it only scores."""
        from lm_eval.models.utils import normalize_gen_kwargs

        writing = [t for t in self.tasks.values() if t.get_config("output_type") == "generate_until"]
        lengths = [normalize_gen_kwargs(t.get_config("generation_kwargs"))["max_gen_toks"] for t in writing]
        return max(lengths, default=0)

    @property
    def protocol(self) -> dict[str, dict[str, Any]]:
        """By name, how the harness' tasks ask: the number of examples and the definition's version."""
        return {
            name: {"num_fewshot": task.get_config("num_fewshot"), "version": task.VERSION}
            for name, task in self.tasks.items()
        }


def open_tasks(
    tasks: Sequence[Task], data: Path | str | None, num_fewshot: int | None = None
) -> dict[str, OpenedTask]:
    """Read the questions and documents of every task; a first one is put together on trial.

    Args:
        tasks: Harness tasks.
        data: Folder with local files (`local_data`); None for the hub.
        num_fewshot: Examples before every question; None for none, or a harness task's own number.

    Returns:
        By name, in order. A tag, or a group without figures of its own, gives its members their own places.

    Raises:
        UserError: If the data of a task can't be had or have other fields than the task needs, or a task needs
            software that is missing, runs code, or shows pictures.
    """
    if not tasks:
        return {}
    opened: dict[str, OpenedTask] = {}
    for task in tasks:
        with quiet(), _seeded():
            for one in _open(task, None if data is None else Path(data), num_fewshot):
                if one.task.name in opened:
                    raise UserError(
                        f"--tasks: {one.task.name!r} comes twice, also in {task.name!r}; leave one out"
                    )
                opened[one.task.name] = one
    return opened


def _open(task: Task, data: Path | None, num_fewshot: int | None) -> list[OpenedTask]:
    from lm_eval.api.task import ConfigurableTask

    def shots(own: int | None) -> int:
        # The harness never overrides a zero in a definition, and takes none for zero.
        if own == 0 or task.kind == "documents" or (num_fewshot is None and task.kind == "questions"):
            return 0
        return (own or 0) if num_fewshot is None else num_fewshot

    # Local files of one task are read at once.
    telling = (
        nullcontext(_say_nothing) if data and task.kind != "harness" else working(f"opening {task.name}")
    )
    reader = DataReader(ConfigurableTask.download, task.name, data, shots)
    try:
        with telling as say, changed(ConfigurableTask, "download", reader.reporting(say)):
            loaded = load(_definition(task))
        for name, one in loaded["tasks"].items():
            reader.task = name
            if data is not None and name not in reader.local:
                raise no_local_data(name)
            _prepare(one, shots(one.get_config("num_fewshot")))
    except UserError:
        raise
    except ImportError as error:
        said = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"task {task.name!r} needs software that is missing ({said}); install it") from error
    except Exception as error:
        said = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"task {reader.task!r} can't be set up from {reader.origin} ({said})") from error
    return [_named(task, unit) for unit in _with_figures(loaded)]


def _say_nothing(_: str) -> None:
    pass


def _definition(task: Task) -> str:
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    return task.definition if task.kind == "harness" else str(stock / task.definition)


def _prepare(task: Any, shots: int) -> None:
    """Set the number of examples, and put the first question together."""
    if getattr(task, "UNSAFE_CODE", False):
        raise unsafe(task.task_name)
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"task {task.task_name!r} shows pictures or plays sounds; leave it out")
    task.set_config(key="num_fewshot", value=shots)
    if shots:
        task.set_fewshot_seed(_OTHER_SEED)
        task.fewshot_context(task.eval_docs[0], num_fewshot=shots)


def _with_figures(loaded: Any) -> list[Any]:
    """The outermost tasks and groups that have figures of their own."""
    top = list(loaded["groups"].values())[:1] or loaded["tasks"].values()

    def below(item: Any) -> Iterator[Any]:
        if getattr(item, "has_aggregation", True):
            yield item
        else:
            for child in item:
                yield from below(child)

    return [found for item in top for found in below(item)]


def _named(task: Task, unit: Any) -> OpenedTask:
    if hasattr(unit, "has_aggregation"):
        tasks = {one.task_name: one for one in unit.get_all_tasks()}
        groups = {group.name: group for group in (unit, *unit.get_all_groups())}
        metrics = [metric.metric for metric in unit.aggregate_metric_list]
        return OpenedTask(_renamed(task, unit.name, metrics, tasks.values()), tasks, groups)
    metrics = list(unit.higher_is_better())[:1]
    return OpenedTask(_renamed(task, unit.task_name, metrics, [unit]), {unit.task_name: unit}, {})


def _renamed(task: Task, name: str, metrics: Sequence[str], asking: Any) -> Task:
    """The task that stands for what the harness calls `name`; a member of a group may be one of our own."""
    if task.kind != "harness":
        return task
    if name in TASKS:
        return TASKS[name]
    better: dict[str, bool] = {}
    for one in asking:
        better |= one.higher_is_better()
    shown = {metric: bool(better.get(metric, True)) for metric in metrics}
    return replace(task, name=name, label=name, shown=shown)


def run_task(
    opened: OpenedTask,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: EvalConfig,
    *,
    max_length: int | None = None,
    description: str = "",
) -> Metrics:
    """Measure one task on one model.

    Args:
        opened: From `open_tasks`.
        lm: The model on its device.
        tokenizer: Its own.
        config: How to ask, and how much.
        max_length: Tokens the model reads at once; None leaves it to the harness.
        description: For the progress report.

    Returns:
        The word perplexity. Of other tasks and of groups, every metric by the harness' name (`acc`,
        `exact_match,strict-match`) as it gives it, where there is one the standard error (`acc_stderr`), and the
        number of `samples`; of a group also those of its members, as `subtasks`.
    """
    from lm_eval.evaluator import evaluate

    from roi_lightning.evaluation.harness_model import SlicedHFLM

    with quiet(description), _seeded():
        model = SlicedHFLM(lm, tokenizer, max_length, config.batch_size, description)
        for task in opened.tasks.values():
            task.set_fewshot_seed(_OTHER_SEED)
        found = evaluate(
            lm=model,
            task_dict={"tasks": opened.tasks, "groups": opened.groups},
            limit=config.first,
            log_samples=False,
            system_instruction=config.system_instruction,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.apply_chat_template,
        )
    if opened.task.kind == "documents":
        return float(found["results"][opened.outermost]["word_perplexity,none"])
    return _figures(opened.outermost, found)


def _figures(name: str, found: Any) -> dict[str, Any]:
    metrics = found["results"][name]
    figures: dict[str, Any] = {
        key.removesuffix(",none"): float(value)
        for key, value in metrics.items()
        if "," in key and isinstance(value, Real)
    }
    figures["samples"] = int(metrics.get("sample_len", 0))
    if name in found["group_subtasks"]:
        figures["subtasks"] = {child: _figures(child, found) for child in found["group_subtasks"][name]}
    return figures


@contextmanager
def _seeded() -> Iterator[None]:
    """Random numbers as in the harness' own program, and afterwards those from before."""
    import numpy as np
    import torch
    from lightning.pytorch.utilities.seed import isolate_rng

    with isolate_rng():
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)  # noqa: NPY002 - the one that the harness seeds
        torch.manual_seed(_OTHER_SEED)
        yield
