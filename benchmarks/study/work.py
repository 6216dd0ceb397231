"""Work that is done once: a folder says with what arguments, and holds the result when it is there."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roi_lightning.utils.atomic_io import write_json

_REPOSITORY = Path(__file__).resolve().parents[2]


class WorkFailed(Exception):  # noqa: N818 - it is the work that failed, not this program
    """A command ended with another status than 0."""


@dataclass(frozen=True)
class Usage:
    """What a process took."""

    seconds: float
    peak_rss_bytes: int


@contextmanager
def sole_user(out: Path) -> Iterator[None]:
    """Refuse to work in a folder in which another study works, or a child that one left behind.

    Raises:
        SystemExit: Naming the folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"error: another study is running in {out}") from None
        os.set_inheritable(file.fileno(), True)
        yield


def check_claim(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Refuse a folder with work of another recipe.

    Raises:
        SystemExit: Naming the folder and the first difference.
    """
    file = folder / "recipe.json"
    if not file.exists():
        return
    old, new = _flat(json.loads(file.read_text())), _flat(json.loads(json.dumps(recipe)))
    for key in [*old, *new]:
        if old.get(key) != new.get(key):
            change = f"{key} was {old.get(key)!r} and is {new.get(key)!r} now"
            raise SystemExit(
                f"error: {folder} was made with other arguments: {change}; remove it or choose another --out"
            )


def claim(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Say what the folder's work is, before it begins."""
    check_claim(folder, recipe)
    if not (folder / "recipe.json").exists():
        write_json(folder / "recipe.json", recipe)


def result_of(folder: Path) -> dict[str, Any] | None:
    """The result, if the work is done."""
    result: dict[str, Any] | None = read_json(folder / "result.json")
    return result


def fetch(store: Path, name: str, out: Path) -> None:
    """Take over a result that was put into the store, unless the folder has its own; claims are checked later."""
    if not (out / name / "result.json").exists() and (store / name / "result.json").exists():
        put(out, name, store)


def put(store: Path, name: str, out: Path) -> None:
    """Copy a result and its recipe, and nothing else, to another folder."""
    for file in ("recipe.json", "result.json"):  # in this order: a result is what makes work done
        write_json(store / name / file, read_json(out / name / file))


def read_json(file: Path) -> Any:
    """What a file holds; None without it."""
    return json.loads(file.read_text()) if file.exists() else None


def run_commands(commands: Sequence[Sequence[str]], log: Path) -> Usage:
    """Run commands of `roi_lightning`, several in one process, which imports once."""
    if len(commands) == 1:
        return run_logged(["-m", "roi_lightning", *commands[0]], log)
    return run_logged(["-m", "benchmarks.study.commands", json.dumps(commands)], log)


def run_logged(arguments: Sequence[str], log: Path) -> Usage:
    """Run Python with all it says appended to a file.

    Returns:
        Its wall time and its peak memory. Linux counts what this process held when it started the
        other, so this one had better stay small.

    Raises:
        WorkFailed: With the last lines of the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
    started = time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            close_fds=False,  # a child holds the lock of `sole_user` too
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise WorkFailed(f"exit status {process.returncode}; the end of {log}:\n{_tail(log)}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Usage(round(time.monotonic() - started, 1), usage.ru_maxrss * unit)


def _tail(log: Path, lines: int = 8) -> str:
    return "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-lines:])


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    pairs: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if not pairs:
        return {key: value}
    return {k: v for name, part in pairs for k, v in _flat(part, f"{key}.{name}".lstrip(".")).items()}
