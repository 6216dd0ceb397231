"""lm-evaluation-harness' list of tasks, groups and tags, and definitions in a user's own YAML files.

The list is made from some 13,000 files, which takes seconds: only names that this package doesn't know need it.
"""

import functools
from pathlib import Path
from typing import Any, Final

from roi_lightning.errors import UserError, did_you_mean, reason
from roi_lightning.evaluation.quiet import silent_log
from roi_lightning.utils.extras import install
from roi_lightning.utils.progress import working

SUFFIXES: Final = (".yaml", ".yml")


@functools.cache
def registry(also: Path | None = None) -> Any:
    """The harness' `TaskManager`, with the definitions of a folder beside its own."""
    from lm_eval.tasks import TaskManager

    with working("reading lm-evaluation-harness' list of tasks"), silent_log():
        return TaskManager(include_path=also)


def check_name(name: str, more: list[str]) -> None:
    """Refuse a name that is no task, group or tag of the harness.

    Args:
        name: Of `--tasks`.
        more: Names that are known without the harness.

    Raises:
        UserError: With the nearest names, or if the task runs code that a model writes.
    """
    entry = registry().task_index.get(name)
    if entry is None:
        near = (
            did_you_mean(name, dict.fromkeys([*more, *registry().all_tasks]))
            or f"; own names are {', '.join(more)}"
        )
        raise UserError(f"--tasks: lm-evaluation-harness has no task, group or tag {name!r}{near}")
    if entry.cfg and entry.cfg.get("unsafe_code"):
        raise unsafe(name)


def name_in(file: Path) -> str:
    """The name that a definition in YAML gives to its task or group.

    Raises:
        UserError: If the file can't be read, or names neither.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    if not file.is_file():
        raise UserError(f"--tasks: there is no file {str(file)!r}; give a task's YAML file")
    try:
        content = load_yaml(file, resolve_func=False)
    except Exception as error:  # whatever PyYAML and files can raise
        raise UserError(f"--tasks: {str(file)!r} can't be read ({reason(error)}); mend it") from error
    name = content.get("group") or content.get("task")
    if not isinstance(name, str):
        raise UserError(f"--tasks: {str(file)!r} names no task; give it a line `task: NAME`")
    return name


def load(definition: str) -> Any:
    """The harness' tasks and groups of a definition; a file with one task does not need the whole list.

    Args:
        definition: A name of the list, or the absolute path of a YAML file.

    Returns:
        What the harness' `TaskManager.load` gives.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    file = Path(definition)
    if not file.is_absolute():
        return registry().load([definition])
    group = load_yaml(file, resolve_func=False).get("group")
    if group is not None:  # its members may be anybody's, and the harness opens a group only by its name
        return registry(file.parent).load([group])
    return TaskManager(include_defaults=False).load([definition])


def unsafe(name: str) -> UserError:
    """What is said of a task that runs code."""
    return UserError(
        f"task {name!r} runs code that a model writes, which evaluate does not; run it in a sandbox with the "
        "harness' own program and --confirm_run_unsafe_code"
    )


def without_harness(name: str, known: list[str]) -> UserError:
    """What is said of a name that only the harness could know, where it is not installed."""
    near = did_you_mean(name, known)
    return UserError(
        f"--tasks: {name!r} is none of {', '.join(known)}{near}; other tasks need lm_eval: run `{install('eval')}`"
    )
