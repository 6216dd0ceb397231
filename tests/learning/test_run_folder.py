"""One run, one folder: where a run's files go, whatever the configuration, and whose are replaced."""

import json
from pathlib import Path

import pytest
import torch

from helpers.lab import QUICK_TRAINER, make_lab, run
from roi_lightning.cli.lightning import build
from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.learning.run_folder import claim_folder
from roi_lightning.learning.trainer import RoITrainer

lab = pytest.fixture(make_lab)
LOG = "events.out.tfevents"
ALL = {"checkpoints", "config.yaml", "export", "mask.safetensors", "summary.json"}


def files(folder):
    """What lies at the top of a run's folder, logs left out and counted."""
    names = {path.name for path in folder.iterdir()} - {"hparams.yaml"}
    logs = {name for name in names if name.startswith(LOG)}
    return names - logs, len(logs)


def contents(folder):
    """Bytes of every file that is no log."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(LOG))
    return {path: path.read_bytes() for path in paths}


def folder_of(*args):
    return Path(build([str(arg) for arg in args]).trainer.default_root_dir)


def test_the_name_of_a_run(lab):
    start = ["--config", "qwen0.5b_2of4.yaml", "--model.lm", lab.model]
    (lab.folder / "mine.yaml").write_text("model: { init_args: { init_std: 0.1 } }\n")
    assert folder_of(*start) == Path("runs/qwen0.5b_2of4")
    overlays = ["-c", "overlays/straight_through", "-c", "mine.yaml"]
    assert folder_of(*start, *overlays) == Path("runs/qwen0.5b_2of4+straight_through+mine")
    assert folder_of(*start, *overlays, "--run", "a") == Path("runs/a")
    assert folder_of(*start, "--trainer.default_root_dir", "there") == Path("there")
    assert folder_of(*start, "--trainer.default_root_dir", "there", "--run", "a") == Path("there/a")
    assert folder_of("--model.lm", lab.model, "--trainer.max_steps", "1") == Path("runs/model")
    for name in ("", " ", ".", "..", "a/b", "/abs", "n" * 256):
        with pytest.raises(UserError, match="plain name"):
            folder_of(*start, "--run", name)
    with pytest.raises(UserError, match="default_root_dir is empty"):
        folder_of(*start, "--trainer.default_root_dir", "")


def test_what_no_run_made_is_never_replaced(lab, capsys):
    there = lab.folder / "there"
    (there / "masks").mkdir(parents=True)
    mine = {
        there / "masks/x.safetensors": "mine",
        there / "summary.json": "mine",
        there / "config.yaml": "a: 1",
    }
    for path, text in mine.items():
        path.write_text(text)
    assert run("fit", *lab.quick("--trainer.default_root_dir", there, "--overwrite")) == 1
    assert "no run made" in capsys.readouterr().err
    assert {path: path.read_text() for path in there.rglob("*") if path.is_file()} == mine


def test_everything_of_a_run_is_in_its_folder(lab):
    assert run("fit", *lab.quick()) == 0
    assert files(lab.folder / "runs/quickstart") == (ALL, 1)
    # Another base, without a log, in the folder that was asked for.
    again = ["--config", "qwen0.5b_2of4.yaml", *lab.options(), "--trainer.default_root_dir", "there"]
    assert run("fit", *again, "--trainer.logger", "false") == 0
    assert files(lab.folder / "there") == (ALL, 0)
    assert {path.name for path in lab.folder.iterdir()} >= {"runs", "there"}
    assert {path.name for path in (lab.folder / "runs").iterdir()} == {"quickstart"}


def test_a_run_continues_by_its_own_config_file(lab, capsys):
    assert run("fit", *lab.quick()) == 0
    config = lab.folder / "runs/quickstart/config.yaml"
    assert folder_of("--config", config) == Path("runs/quickstart")
    assert run("fit", "--config", config) == 1
    assert "--resume auto" in capsys.readouterr().err
    assert run("fit", "--config", config, "--resume", "auto") == 0


def test_another_runs_results_are_replaced_only_when_asked(lab, capsys):
    assert run("fit", *lab.quick()) == 0
    folder = lab.folder / "runs/quickstart"
    before = contents(folder)
    other = lab.quick("--run", "quickstart", "--model.prior", "none", max_steps=3)
    assert run("fit", *other) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in ("runs/quickstart", "--resume auto", "--overwrite", "--run NAME"))
    assert contents(folder) == before
    assert run("fit", *other, "--overwrite") == 0
    assert files(folder) == (ALL, 1), "the earlier run's log is gone"
    assert [path.name for path in (folder / "checkpoints").iterdir() if not path.is_symlink()] == [
        "step=3.ckpt"
    ]
    assert read_sidecar(folder / "export")["training"]["prior"] == "none"
    assert "activation" not in json.loads((folder / "summary.json").read_text())["perplexity"]


def test_nothing_is_removed_by_a_run_that_can_not_start(lab, capsys):
    assert run("fit", *lab.quick()) == 0
    folder = lab.folder / "runs/quickstart"
    before = contents(folder)
    (lab.folder / "empty.jsonl").write_text('{"text": "too short"}\n')
    assert run("fit", *lab.quick(), "--overwrite", "--data.corpora", "empty.jsonl") == 1
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["checkpoints/step=3.ckpt", "masks/step-000002.safetensors", "report.html"])
def test_what_counts_as_a_result(tmp_path, name):
    trainer = RoITrainer(**QUICK_TRAINER, max_steps=1, default_root_dir=str(tmp_path))
    claim_folder(trainer, None, overwrite=False)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    torch.save({}, tmp_path / name)
    with pytest.raises(UserError, match="no run made"):
        claim_folder(trainer, None, overwrite=True)
    (tmp_path / "config.yaml").write_text(
        "model: { class_path: roi_lightning.learning.roi.RoILightningModule }"
    )
    with pytest.raises(UserError, match=Path(name).stem):
        claim_folder(trainer, None, overwrite=False)
    claim_folder(trainer, str(tmp_path / "checkpoints/step=3.ckpt"), overwrite=False)
    with pytest.raises(UserError, match="earlier run"):
        claim_folder(trainer, str(tmp_path.parent / "other/checkpoints/step=3.ckpt"), overwrite=False)
    claim_folder(trainer, None, overwrite=True)
    assert (tmp_path / name).exists(), "until training starts"


def test_a_folder_in_an_export_of_the_users_is_never_removed(lab, capsys):
    assert run("fit", *lab.quick()) == 0
    note = lab.folder / "runs/quickstart/export/note.txt"
    note.write_text("mine")
    assert run("fit", *lab.quick(), "--overwrite") == 1
    assert "note.txt" in capsys.readouterr().err
    assert note.read_text() == "mine"
