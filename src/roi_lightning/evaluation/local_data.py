"""Questions of lm-evaluation-harness' tasks from local files instead of the hub.

A folder holds `TASK.jsonl`, the split that is scored, and `TASK.SPLIT.jsonl`, any other that the task needs: the one
its examples come from. TASK and SPLIT are the names in the task's definition.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from roi_lightning.errors import UserError

_READERS: Final = ("csv", "json", "parquet", "text")
_SPLITS: Final = ("training_split", "validation_split", "test_split")
_OWN_FILES: Final = (
    "its own files; check its fields and its data_files (from the working directory, as in the harness)"
)
_HUB: Final = "the hub; check the network, or give local files with --task_data"


class DataReader:
    """Stands in for `ConfigurableTask.download`, which gives a task its questions.

    Args:
        download: What it stands in for.
        name: Of what is opened.
        folder: Where the files are; None for the hub.
        shots: From a task's own number of examples to the one that will be used.

    Attributes:
        task: The name, if it has one, of the task whose questions were asked for last.
        origins: By task, where they come from, for errors.
        local: The names of the tasks that were read from the folder or from files that their definition names.
    """

    def __init__(
        self,
        download: Callable[..., None],
        name: str,
        folder: Path | None,
        shots: Callable[[int | None], int],
    ) -> None:
        self._download, self._folder, self._shots = download, folder, shots
        self.task = name
        self.origins: dict[str, str] = {}
        self.local: set[str] = set()
        self._done = 0

    def reporting(self, say: Callable[[str], None]) -> Callable[..., None]:
        """`read` as a method of the task, which says how many tasks it has read for."""

        def download(task: Any, *args: Any, **kwargs: Any) -> None:
            self.read(task, *args, **kwargs)
            self._done += 1
            say(f"{self._done} data sets read, the last of {self.task}")

        return download

    def read(self, task: Any, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Give a task its questions.

        Raises:
            UserError: If a file is missing.
        """
        import datasets

        self.task = task.config.task or self.task
        if _names_files(task.config):
            self.local.add(self.task)
            self.origins[self.task] = _OWN_FILES
            self._download(task, dataset_kwargs)
        elif self._folder is None:
            self.origins[self.task] = _HUB
            self._download(task, dataset_kwargs)
        else:
            self.local.add(self.task)
            files = self._files(task.config)
            named = ", ".join(repr(file) for file in files.values())
            self.origins[self.task] = f"{named}; check its fields against the harness' task"
            task.dataset = datasets.load_dataset("json", data_files=files)

    @property
    def origin(self) -> str:
        """Where the questions of the last task come from, and what to check there."""
        return self.origins.get(self.task, "its definition; mend it")

    def _files(self, config: Any) -> dict[str, str]:
        """The file of every split that is read; the task forgets about others."""
        assert self._folder is not None
        scored = config.test_split or config.validation_split
        if scored is None:
            raise no_local_data(self.task)
        files = {scored: self._folder / f"{self.task}.jsonl"}
        examples = _examples_split(config) if self._shots(config.num_fewshot) else None
        if examples is not None and examples != scored:
            files[examples] = self._folder / f"{self.task}.{examples}.jsonl"
        for split, file in files.items():
            if not file.is_file():
                purpose = "the questions" if split == scored else "its examples, or use --num_fewshot 0"
                raise UserError(
                    f"task {self.task!r}: no file {str(file)!r} in --task_data; give a folder with it, which holds "
                    f"{purpose} (split {split!r})"
                )
        for name in _SPLITS:
            if getattr(config, name) not in files:
                setattr(config, name, None)
        if config.fewshot_config.split not in files:
            config.fewshot_config.split = config.fewshot_split = None
        config.custom_dataset = None
        return {split: str(file.resolve()) for split, file in files.items()}


def no_local_data(name: str) -> UserError:
    """What is said of a task that fetches its questions by a program of its own."""
    return UserError(
        f"task {name!r} fetches its questions by itself and can't read --task_data; leave out one of the two"
    )


def _names_files(config: Any) -> bool:
    """Whether a definition names local files."""
    files = (config.dataset_kwargs or {}).get("data_files")
    return config.dataset_path in _READERS and files is not None and "://" not in str(files)


def _examples_split(config: Any) -> str | None:
    """Where the harness takes a task's examples from; None for a list in its definition."""
    chosen = config.fewshot_config
    if chosen.split is not None:
        return str(chosen.split)
    if chosen.samples is not None:
        return None
    found: str | None = config.training_split or config.validation_split or config.test_split
    return found
