"""Tasks of lm-evaluation-harness: opened before any model is loaded, then asked by way of our scorer."""

import functools
import glob
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import yaml
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.errors import UserError, reason
from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.utils.progress import working

# Where the tasks of the tables are defined: the harness' whole list has 14,000 names and takes ten seconds to read.
_FOLDERS: Final = ("arc", "hellaswag", "piqa", "race", "sciq", "super_glue/boolq", "wikitext")
# The harness' own; its metrics without a formula for the error take so many resamplings.
_SEED, _OTHER_SEED, _RESAMPLINGS = 0, 1234, 100


def open_tasks(names: Sequence[str], data: Path | str | None, num_fewshot: int | None) -> dict[str, Any]:
    """Read the questions of tasks.

    Args:
        names: Tasks, groups and tags of the harness, or YAML files.
        data: Folder of TASK.jsonl, the questions, and TASK.SPLIT.jsonl, the examples; None for the hub.
        num_fewshot: Examples before every question, but of tasks whose definition says 0; None for their own number.

    Returns:
        What `lm_eval.evaluate` takes, for any number of models; empty without names.

    Raises:
        UserError: If a name is unknown, or questions can't be had or don't fit the definition.
    """
    if not names:
        return {}
    try:
        with _seeded(), working("opening tasks"), TemporaryDirectory() as folder:
            known, specs = _known(names), list(names)
            if data is not None:
                local = functools.partial(_local, data=Path(data), folder=Path(folder), shots=num_fewshot)
                specs = [local(known.task_index[x]) if x in known.task_index else x for x in names]
            tasks: dict[str, Any] = known.load(specs)
    except UserError:
        raise
    except Exception as error:  # whatever definitions, their code and their data can raise
        raise UserError(
            f"--tasks {','.join(names)}: {type(error).__name__}: {reason(error)}; check the names (see `lm_eval ls "
            "tasks`) and the network, or the fields of the files in --task_data"
        ) from error
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config("num_fewshot", (own or 0) if own == 0 or num_fewshot is None else num_fewshot)
    return tasks


def run_tasks(
    tasks: dict[str, Any],
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: EvalConfig,
    *,
    max_length: int | None = None,
    description: str = "",
) -> dict[str, Any]:
    """Ask a model.

    Args:
        tasks: From `open_tasks`.
        lm: The model on its device.
        tokenizer: Its own.
        config: How to ask, and how much.
        max_length: Tokens the model reads at once; None leaves it to the harness.
        description: For the progress report.

    Returns:
        What `lm_eval.evaluate` does.

    Raises:
        UserError: If the harness refuses: tasks that run code or show pictures, answers longer than the model reads.
    """
    from lm_eval import evaluate

    from roi_lightning.evaluation.harness_model import SlicedHFLM

    try:
        with _seeded():
            for task in tasks["tasks"].values():
                task.set_fewshot_seed(_OTHER_SEED)
            results: dict[str, Any] = evaluate(
                lm=SlicedHFLM(lm, tokenizer, max_length, config.batch_size, description),
                task_dict=tasks,
                limit=config.first,
                bootstrap_iters=_RESAMPLINGS,
                log_samples=False,
                system_instruction=config.system_instruction,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=config.apply_chat_template,
            )
    except UserError:
        raise
    except (AssertionError, ValueError) as error:
        raise UserError(f"{description}: {reason(error)}") from error
    return results


def figures_of(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Every metric by task or group and the harness' name for it, its error as NAME_stderr, and the `samples`."""
    return {
        name: {
            k.removesuffix(",none"): float(x) for k, x in metrics.items() if "," in k and isinstance(x, Real)
        }
        | {"samples": int(metrics.get("sample_len", 0))}
        for name, metrics in results["results"].items()
    }


@functools.cache
def _task_manager(whole: bool) -> Any:
    import lm_eval.tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if whole:
        return lm_eval.tasks.TaskManager()
    stock = Path(lm_eval.tasks.__file__).parent
    folders = [str(stock / folder) for folder in _FOLDERS]
    return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)


def _known(names: Sequence[str]) -> Any:
    """The harness' list of tasks, as much of it as is needed."""
    short = _task_manager(False)
    return _task_manager(any(x not in short.task_index and not x.endswith((".yaml", ".yml")) for x in names))


def _local(entry: Any, data: Path, folder: Path, shots: int | None) -> str:
    """Write a definition that reads files where the one in the harness' list reads the hub; its path."""
    questions = data / f"{entry.name}.jsonl"
    if entry.kind.name != "TASK":
        raise UserError(
            f"--task_data has files of single tasks; name the tasks of {entry.name!r} instead of it"
        )
    if not questions.is_file():
        raise UserError(
            f"task {entry.name!r}: no file {str(questions)!r} in --task_data; give a folder with it"
        )
    examples = {x.suffixes[-2][1:]: x for x in sorted(data.glob(f"{entry.name}.*.jsonl"))}
    in_definition = "samples" in (entry.cfg.get("fewshot_config") or {})
    if (entry.cfg.get("num_fewshot") if shots is None else shots) and not examples and not in_definition:
        raise UserError(
            f"task {entry.name!r}: no file {entry.name}.train.jsonl with its examples in --task_data; add it, or use "
            "--num_fewshot 0"
        )
    files = {split: glob.escape(str(x.resolve())) for split, x in {"test": questions, **examples}.items()}
    definition = {
        "include": str(entry.yaml_path),
        "task": entry.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "custom_dataset": None,
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": next(iter(examples), None),
    }
    file = folder / f"{entry.name}.yaml"
    file.write_text(yaml.safe_dump(definition))
    return str(file)


@contextmanager
def _seeded() -> Iterator[None]:
    """Random numbers as in the harness' own program, and afterwards those from before.

    The download counter of `datasets` is off, which uses the network even for local files.
    """
    import datasets
    import numpy as np
    import torch
    from lightning.pytorch.utilities.seed import isolate_rng

    with isolate_rng(), patch.object(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False):
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)  # noqa: NPY002 - the one that the harness seeds
        torch.manual_seed(_OTHER_SEED)
        yield
