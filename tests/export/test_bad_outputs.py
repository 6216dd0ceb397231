"""Places where a result can't or must not go, for the commands that write one."""

import sys
from types import SimpleNamespace

import pytest

from helpers.lab import run
from helpers.refusals import assert_refused, make_bench, rows

bench = pytest.fixture(make_bench)


def prune(bench, out):
    return ["prune", bench.model, "--method", "magnitude", "--out", out]


def apply(bench, out):
    return ["apply", bench.model, bench.mask, "--out", out]


def pack(bench, out):
    return ["pack", bench.export, "--out", out]


def export(bench, out):
    checkpoint = "--ckpt_path", bench.checkpoint, "--allow_changed_settings"
    return ["export", *bench.lean(*checkpoint, "--out", out)]


def fit(bench, out):
    return ["fit", *bench.lean("--trainer.callbacks", "SparseExport", "--trainer.callbacks.out", out)]


def run_folder(bench, out):
    return ["fit", *bench.quick("--trainer.default_root_dir", out, "--trainer.logger", "false")]


def theirs(bench):
    """A folder with a stranger's file."""
    return bench.write("theirs/notes.txt", "mine").parent


def file(bench):
    return bench.write("file", "mine")


def base_itself(bench):
    return bench.copy(bench.model)


def prune_itself(bench, model):
    return ["prune", model, "--method", "magnitude", "--out", model]


def export_itself(bench):
    return bench.copy(bench.export)


def pack_itself(bench, model):
    return ["pack", model, "--out", model]


def nowhere(bench):
    """A folder that even root can't write to."""
    return "/proc/out"


NOT_OURS = "was not written by roi_lightning"
COMMANDS = {"prune": prune, "apply": apply, "pack": pack, "export": export, "fit": fit}
TABLE = {
    **{f"a stranger's folder, {name}": (theirs, command, NOT_OURS) for name, command in COMMANDS.items()},
    "the base itself, pruned": (base_itself, prune_itself, "base model itself"),
    "an export packed over itself": (export_itself, pack_itself, "model itself"),
    "a run in a file": (file, run_folder, "file.*/config.yaml' can't be written; give"),
}
if sys.platform == "linux":
    TABLE |= {
        f"a place that takes no files, {name}": (nowhere, command, "'/proc/out.* are free; make room")
        for name, command in {"prune": prune, "fit": fit}.items()
    }
    TABLE["a place that takes no files, run"] = (nowhere, run_folder, "'/proc/out'; check the path")


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)


@pytest.mark.parametrize("command", [prune, fit])
def test_a_full_disk_is_refused(bench, capsys, monkeypatch, command):
    arguments = command(bench, "out")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    assert_refused(bench, capsys, arguments, r"'.*out' needs 0\.00 GB and 0\.00 GB are free")


@pytest.mark.parametrize("command", [prune, apply, pack, export])
def test_a_disk_that_fills_up_is_refused(bench, capsys, monkeypatch, command):
    def full(handle):
        raise OSError(28, "No space left on device")

    arguments = command(bench, "out")
    monkeypatch.setattr("os.fsync", full)
    assert_refused(bench, capsys, arguments, "can't be written.*No space left")


def test_missing_parents_are_made(bench):
    assert run(*apply(bench, "deep/deeper/out")) == 0
    assert run("verify", "deep/deeper/out", "--base", bench.model) == 0
