"""Places where a result can't or must not go, for every command that writes one."""

import os
import sys
from types import SimpleNamespace

import pytest

from refusals import assert_refused, make_bench, rows

bench = pytest.fixture(make_bench)


def prune(bench, out):
    return ["prune", bench.model, "--method", "magnitude", "--out", out]


def permute(bench, out):
    return ["permute", bench.model, "--corpora", bench.corpus, "--out", out]


def sparsegpt(bench, out):
    words = ["--method", "sparsegpt", "--corpora", bench.corpus, "--windows", "2", "--seq_len", "32"]
    return ["prune", bench.model, *words, "--out", out]


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


def log_folder(bench, out):
    return ["fit", *bench.quick("--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", out)]


def compare(bench, out):
    return ["compare", bench.mask, bench.export, "--out", out]


def compare_json(bench, out):
    return ["compare", bench.mask, bench.export, "--out", "out", "--json", out]


def pack_json(bench, out):
    return ["pack", bench.export, "--out", "out", "--json", out]


def verify_json(bench, out):
    return ["verify", bench.export, "--json", out]


def plan_json(bench, out):
    return ["plan", *bench.lean("--json", out)]


def evaluate_json(bench, out):
    return ["evaluate", bench.model, "--text", bench.corpus, "--seq_len", "32", "--limit", "1", "--json", out]


def theirs(bench):
    """A folder with a stranger's file."""
    return bench.write("theirs/notes.txt", "mine").parent


def fake(bench):
    return bench.write("fake/roi_sparsity.json", "{}").parent


def file(bench):
    return bench.write("file", "mine")


def below_file(bench):
    return file(bench) / "deep" / "out"


def folder(bench):
    (bench.folder / "folder").mkdir()
    return bench.folder / "folder"


def link(bench):
    (bench.folder / "link").symlink_to(folder(bench))
    return bench.folder / "link"


def loose_link(bench):
    (bench.folder / "link").symlink_to("nowhere")
    return bench.folder / "link"


def used_export(bench):
    out = bench.copy(bench.export)
    (out / "notes.txt").write_text("mine")
    return out


def of_itself(command):
    """The base model's own folder as the place to write."""
    return lambda bench, model: command(SimpleNamespace(**vars_of(bench) | {"model": model}), model)


def vars_of(bench):
    return {"mask": bench.mask, "corpus": bench.corpus}


def its_parent(bench):
    bench.copy(bench.model)
    return bench.folder


def nowhere(bench):
    """A folder that even root can't write to."""
    return "/proc/out"


def read_only(bench):
    place = folder(bench)
    place.chmod(0o500)
    return place / "out"


NOT_OURS = "was not written by roi_lightning"
NO_FOLDER = "is no folder that can be written to"
COMMANDS = {"prune": prune, "permute": permute, "apply": apply}
COMMANDS |= {"pack": pack, "export": export, "fit": fit}
TABLE = {
    **{f"a stranger's folder, {name}": (theirs, command, NOT_OURS) for name, command in COMMANDS.items()},
    **{f"a file, {name}": (file, command, NOT_OURS) for name, command in COMMANDS.items()},
    **{f"below a file, {name}": (below_file, command, NO_FOLDER) for name, command in COMMANDS.items()},
    "a link": (link, prune, NOT_OURS),
    "a link to nothing": (loose_link, apply, NOT_OURS),
    "a sidecar that is none": (fake, apply, "exists and its roi_sparsity.json is not one"),
    "an export with a stranger's file": (used_export, prune, "'notes.txt' in it was not written by"),
    "the base itself, permuted": (
        lambda bench: bench.copy(bench.model),
        of_itself(permute),
        "base model itself",
    ),
    "the base itself, pruned": (lambda bench: bench.copy(bench.model), of_itself(prune), "base model itself"),
    "an export packed over itself": (
        used_export,
        lambda bench, out: ["pack", out, "--out", out],
        "model itself",
    ),
    "the base itself, applied": (
        lambda bench: bench.copy(bench.model),
        of_itself(apply),
        "base model itself",
    ),
    "a file, compared": (file, compare, "is a file; give a folder"),
    "below a file, compared": (below_file, compare, "can't be written"),
    "a folder for JSON, compared": (folder, compare_json, "can't be written"),
    "a folder for JSON, packed": (folder, pack_json, "can't be written"),
    "a folder for JSON, verified": (folder, verify_json, "can't be written"),
    "a folder for JSON, planned": (folder, plan_json, "can't be written"),
    "a folder for JSON, evaluated": (folder, evaluate_json, "can't be written"),
    "below a file for JSON, verified": (below_file, verify_json, "can't be written"),
    "below a file for JSON, planned": (below_file, plan_json, "can't be written"),
    "below a file for JSON, evaluated": (below_file, evaluate_json, "can't be written"),
    "below a file for JSON, packed": (below_file, pack_json, "can't be written"),
    "a run in a file": (file, run_folder, "file.*/config.yaml' can't be written; give"),
    "a run below a file": (below_file, run_folder, "file.*/config.yaml' can't be written; give"),
    "a log in a file": (file, log_folder, "file.*/config.yaml' can't be written; give"),
}
if sys.platform == "linux":
    TABLE |= {
        f"a place that takes no files, {name}": (nowhere, command, "'/proc/out.* are free; make room")
        for name, command in (COMMANDS | {"run": run_folder}).items()
    }
    TABLE |= {
        f"a place that takes no files, {name}": (nowhere, command, "'/proc/out.* can't be written")
        for name, command in {"compare": compare, "plan": plan_json}.items()
    }
if hasattr(os, "geteuid") and os.geteuid() != 0:
    TABLE |= {
        f"a read-only folder, {name}": (read_only, command, NO_FOLDER) for name, command in COMMANDS.items()
    }


@rows(TABLE)
def test_refused(bench, capsys, make, command, says):
    made = make(bench)
    assert_refused(bench, capsys, command(bench, made), says, made)


@pytest.mark.parametrize("command", [prune, sparsegpt, apply, pack, export, fit])
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
    from cli_helpers import run

    assert run(*apply(bench, "deep/deeper/out")) == 0
    assert run("verify", "deep/deeper/out", "--base", bench.model) == 0
