"""What the tables of bad inputs share: good things to spoil, ways to spoil them, and what every refusal must be.

A row of a table is a name and three things: how the bad input is made (a function of the bench; what it gives is
typed), the command that meets it (a function of the bench and that), and words of the message, as a pattern.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

from helpers.lab import Lab, make_lab, run
from helpers.tiny_models import random_masks
from roi_lightning.contrib.packed import write_packed
from roi_lightning.export import write_export
from roi_lightning.models.source import resolve_model
from roi_lightning.utils.checksummed import read_checksummed, write_checksummed

LONGEST_LINE, MOST_LINES = 400, 3
_LEAN = """
model:
  class_path: RoILightningModule
  init_args:
    lm: set by options
    tau: { class_path: Linear, init_args: { start: 0.2, end: 0.05 } }
    lam: { class_path: Linear, init_args: { start: 0.005, end: 0.002 } }
    optimizer: { class_path: torch.optim.AdamW, init_args: { lr: 1.0e-3 } }
data: { corpora: set by options }
trainer: { logger: false, enable_checkpointing: false, num_sanity_val_steps: 0, default_root_dir: runs/lean }
"""
# A run that began has its folder, marked as one, and its log; nothing else may stay.
_LOG = re.compile(r"runs(/(lean|quickstart)(/(\.run|events\.out\..*|hparams\.yaml))?)?")


def rows(table):
    """Parametrize a test by a table: a fault met by one command, by others ("NAME, exported") as slow tests.

    Args:
        table: By name, what a row has beside it.
    """
    named = [name.partition(", ")[0] for name in table]
    params = [
        pytest.param(*row, id=name, marks=[pytest.mark.slow] if fault in named[:i] else [])
        for i, (fault, (name, row)) in enumerate(zip(named, table.items(), strict=True))
    ]
    return pytest.mark.parametrize(("make", "command", "says"), params)


class Bench(Lab):
    """A lab with a mask file, an export, the same packed, and a training checkpoint of its model, all shared."""

    def lean(self, *more, **options):
        """What `quick` gives, without callbacks and logger, which take most of the time that parsing takes."""
        path = self.shared / "lean.yaml"
        if not path.exists():
            path.write_text(_LEAN)
        return ["--config", str(path), *self.options(**options), *more]

    @cached_property
    def mask(self) -> Path:
        path = self.shared / "good_mask.safetensors"
        if not path.exists():
            random_masks(resolve_model(str(self.model))).save(path)
        return path

    @cached_property
    def export(self) -> Path:
        path = self.shared / "good_export"
        if not path.exists():
            source = resolve_model(str(self.model))
            write_export(source, random_masks(source), path)
        return path

    @cached_property
    def packed(self) -> Path:
        path = self.shared / "good_packed"
        if not path.exists():
            write_packed(self.export, path)
        return path

    @cached_property
    def checkpoint(self) -> Path:
        path = self.shared / "good.ckpt"
        return path if path.exists() else self.trained(path)

    def trained(self, path: Path, **options) -> Path:
        """The checkpoint of a run of one step."""
        self.learn(1, **options)[1].save_checkpoint(path)
        return path

    def copy(self, good: Path) -> Path:
        """Something to spoil."""
        path = self.folder / f"bad_{good.name}"
        return Path(shutil.copytree(good, path) if good.is_dir() else shutil.copyfile(good, path))

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


def make_bench(tmp_path, tmp_path_factory, monkeypatch):
    """A fixture's body, as a lab's."""
    lab = make_lab(tmp_path, tmp_path_factory, monkeypatch)
    return Bench(lab.folder, lab.shared)


# How good things are spoiled: functions that make a function of the bench.


def text(name, content):
    """A file."""
    return lambda bench: bench.write(name, content)


def spoiled(good, change):
    """A copy of one of the bench's good files, its bytes changed."""

    def make(bench):
        path = bench.copy(getattr(bench, good))
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def cut(share):
    """The first part of some bytes."""
    return lambda data: data[: int(len(data) * share)]


def flipped(share, bit=0):
    """One bit of some bytes the other way round."""

    def change(data):
        changed = bytearray(data)
        changed[min(int(len(data) * share), len(data) - 1)] ^= 1 << bit
        return bytes(changed)

    return change


def resealed(metadata=None, tensors=None):
    """A copy of the good mask with other metadata or tensors, under a checksum that is right."""

    def make(bench):
        path = bench.copy(bench.mask)
        held, header = read_checksummed(path)
        write_checksummed(path, (tensors or dict)(held), header | (metadata(header) if metadata else {}))
        return path

    return make


# What a refusal must be.

# What to do, or what is accepted; "try:" is the line after an error of the parser's.
_REMEDY = re.compile(
    r"; .*\b(add|check|choose|convert|evaluate|fetch|give|go on|leave|load|lower|move|name|raise|remove|resume)\b"
    r"|; .*\b(set|use)\b|; (make room|learn|run `)|: name the model"
    r"|did you mean|must be|for example|named like|the commands are|^try: ",
    re.MULTILINE,
)


# What says nothing of the value: the file has to be named then.
_VAGUE = ("can't be read", "damaged", "makes no sense", "did not write it", "not written by")


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder with a digest of its content, except the logs of runs."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for name, path in found.items()
        if not _LOG.fullmatch(name)
    }


def assert_refused(bench, capsys, arguments, says, made=None):
    """One error of a few lines that names what is wrong and what to do, a status for failure, no file changed."""
    before = tree(bench.folder)
    capsys.readouterr()
    status = run(*arguments)
    told = capsys.readouterr().err
    assert status in (1, 2), told
    lines = told.splitlines()
    assert "Traceback" not in told
    (at,) = (i for i, line in enumerate(lines) if line.startswith("error: "))
    assert re.search(says, lines[at]), told
    assert _REMEDY.search("\n".join(lines[at:])), f"no remedy: {told}"
    assert len(lines[at]) < LONGEST_LINE, told
    if isinstance(made, Path) and says in _VAGUE:
        assert made.name in lines[at], f"{made.name} is not named: {told}"
    assert len(lines) - at <= MOST_LINES, told
    assert tree(bench.folder) == before


def assert_process_refused(bench, arguments, says):
    """The same of a process of its own."""
    before = tree(bench.folder)
    command = [sys.executable, "-m", "roi_lightning", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode in (1, 2)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.search(says, line)
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert tree(bench.folder) == before
