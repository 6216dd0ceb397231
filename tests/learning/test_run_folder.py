"""One run, one folder: where its files go, whose are replaced, and what is done with another's checkpoint."""

import errno
import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers.lab import GOING_ON, QUICK_TRAINER, make_lab, run
from roi_lightning.cli.lightning import build
from roi_lightning.errors import UserError
from roi_lightning.export.sidecar import read_sidecar
from roi_lightning.learning.run_folder import claim_folder, lock_folder
from roi_lightning.learning.trainer import RoITrainer

lab = pytest.fixture(make_lab)
pytestmark = GOING_ON
LOG = "events.out.tfevents"
ALL = {".run", "checkpoints", "config.yaml", "export", "mask.safetensors", "summary.json"}


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
    bare = ["--model.lm", lab.model, "--trainer.max_steps", "1"]
    assert folder_of(*bare) == Path("runs/model")
    for name in (" ", ".", "..", "a/b", "n" * 256):
        with pytest.raises(UserError, match="plain name"):
            folder_of(*bare, "--run", name)
    with pytest.raises(UserError, match="default_root_dir is empty"):
        folder_of(*bare, "--trainer.default_root_dir", "")


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
    command = ["fit", *lab.quick("--trainer.default_root_dir", there)]
    assert run(*command, "--overwrite") == 1
    assert "no run made" in capsys.readouterr().err
    assert {path: path.read_text() for path in there.rglob("*") if path.is_file()} == mine
    (there / "summary.json").unlink()
    assert run(*command) == 1
    assert "config.yaml' is in a folder that no run made" in capsys.readouterr().err
    assert (there / "config.yaml").read_text() == "a: 1"


def test_a_folder_has_one_run_at_a_time(lab, capsys):
    folder = lab.folder / "runs/quickstart"
    folder.mkdir(parents=True)
    with (folder / ".run").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run("fit", *lab.quick()) == 1
    assert "a run is going on in 'runs/quickstart'; wait" in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == {".run"}
    lock_folder(RoITrainer(**QUICK_TRAINER, max_steps=1, default_root_dir=str(folder))).close()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    """As Lustre is where it is mounted without them."""

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    trainer = RoITrainer(**QUICK_TRAINER, max_steps=1, default_root_dir=str(tmp_path))
    with pytest.warns(UserWarning, match="can't be locked"):
        lock_folder(trainer).close()


@pytest.mark.parametrize("name", ["checkpoints/step=3.ckpt", "masks/step-000002.safetensors", "report.html"])
def test_what_counts_as_a_result(tmp_path, caplog, name):
    trainer = RoITrainer(**QUICK_TRAINER, max_steps=1, default_root_dir=str(tmp_path))
    claim_folder(trainer, None, overwrite=False)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    torch.save({}, tmp_path / name)
    with pytest.raises(UserError, match="no run made"):
        claim_folder(trainer, None, overwrite=True)
    lock_folder(trainer).close()
    with pytest.raises(UserError, match=Path(name).stem):
        claim_folder(trainer, None, overwrite=False)
    (tmp_path / f"{LOG}.1").touch()
    claim_folder(trainer, str(tmp_path / "checkpoints/step=3.ckpt"), overwrite=False)
    assert "log" not in caplog.text, "the run goes on in it"
    with pytest.raises(UserError, match="earlier run"):
        claim_folder(trainer, str(tmp_path.parent / "other/checkpoints/step=3.ckpt"), overwrite=False)
    claim_folder(trainer, None, overwrite=True)
    assert f"{tmp_path} has the log of an earlier run" in caplog.text
    assert (tmp_path / name).exists(), "until training starts"


# A finished run.


def fast(lab, *more, **options):
    """The quickstart at a learning rate that settles other masks within four steps."""
    return lab.quick("--model.optimizer.lr", "0.05", *more, **options)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A finished quickstart on the tiny model, in a folder of runs, where an earlier start has left its log."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("quickstart")
        lab = make_lab(folder, tmp_path_factory, patch)
        (folder / "runs/quickstart").mkdir(parents=True)
        for name in (".run", f"{LOG}.1.earlier"):
            (folder / "runs/quickstart" / name).touch()
        assert run("fit", *fast(lab)) == 0
    return folder / "runs"


@pytest.fixture
def finished(lab, quickstart):
    return shutil.copytree(quickstart, lab.folder / "runs", symlinks=True) / "quickstart"


def training(folder):
    """What an export says of how it was learned."""
    return read_sidecar(folder)["training"]


def test_everything_of_a_run_is_in_its_folder(lab, finished):
    assert files(finished) == (ALL, 1)
    # Another base, without a log, in the folder that was asked for.
    again = ["--config", "qwen0.5b_2of4.yaml", *lab.options(), "--trainer.default_root_dir", "there"]
    assert run("fit", *again, "--trainer.logger", "false") == 0
    assert files(lab.folder / "there") == (ALL, 0)
    assert run("verify", "there/export", "--base", lab.model) == 0
    assert {path.name for path in lab.folder.iterdir()} >= {"runs", "there"}
    assert {path.name for path in (lab.folder / "runs").iterdir()} == {"quickstart"}


def test_another_runs_results_are_replaced_only_when_asked(lab, finished, capsys, caplog):
    before = contents(finished)
    other = fast(lab, "--model.sampler", "StraightThrough", max_steps=3)
    assert run("fit", *other) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in ("runs/quickstart", "--resume auto", "--overwrite", "--run NAME"))
    assert run("fit", *other, "--resume", "auto") == 1, "the other's checkpoints are passed over"
    assert "model.sampler is GumbelTopK there and StraightThrough here" in caplog.text
    assert "is of an earlier run" in capsys.readouterr().err
    assert contents(finished) == before
    assert run("fit", *other, "--overwrite") == 0
    assert files(finished) == (ALL, 1), "the earlier run's log is gone"
    kept = [path.name for path in (finished / "checkpoints").iterdir() if not path.is_symlink()]
    assert kept == ["step=3.ckpt"]
    assert training(finished / "export")["sampler"].startswith("StraightThrough(")
    assert json.loads((finished / "summary.json").read_text())["steps"] == 3
    assert (finished / "mask.safetensors").read_bytes() != before[finished / "mask.safetensors"]


def test_nothing_is_removed_by_a_run_that_can_not_start(lab, finished):
    before = contents(finished)
    (lab.folder / "empty.jsonl").write_text('{"text": "too short"}\n')
    assert run("fit", *fast(lab), "--overwrite", "--data.corpora", "empty.jsonl") == 1
    assert contents(finished) == before


def test_a_file_of_the_users_in_an_export_is_never_removed(lab, finished, capsys):
    note = finished / "export/note.txt"
    note.write_text("mine")
    assert run("fit", *fast(lab), "--overwrite") == 1
    assert "note.txt" in capsys.readouterr().err
    assert note.read_text() == "mine"


def test_a_finished_run_resumes_to_the_same_mask_by_its_own_config_file(lab, finished, capsys):
    mask, made = (finished / "mask.safetensors").read_bytes(), (finished / "checkpoints/last.ckpt").resolve()
    own = ["--config", finished / "config.yaml"]
    assert folder_of(*own) == Path("runs/quickstart")
    assert run("fit", *own) == 1
    assert "--resume auto" in capsys.readouterr().err
    shutil.rmtree(finished / "export")
    assert run("fit", *own, "--resume", "auto") == 0
    assert (finished / "mask.safetensors").read_bytes() == mask
    assert (finished / "checkpoints/last.ckpt").resolve() == made, "no step was left to make"
    assert training(finished / "export")["sampler"].startswith("GumbelTopK(")


def test_a_named_checkpoint_is_of_the_same_run_whose_steps_may_only_grow(lab, finished, capsys):
    last = ["--ckpt_path", finished / "checkpoints/last.ckpt"]
    assert run("fit", *fast(lab, "--run", "other", "--model.optimizer.lr", "0.01", *last)) == 1
    assert "model.optimizer.lr is 0.05 there and 0.01 here" in capsys.readouterr().err
    assert not (lab.folder / "runs/other").exists()
    assert run("fit", *fast(lab), "--allow_changed_settings", "--run", "third") == 1
    assert "--ckpt_path" in capsys.readouterr().err
    assert run("fit", *fast(lab, *last, max_steps=3)) == 1
    assert "run of 4 optimizer steps, and trainer.max_steps is 3" in capsys.readouterr().err
    assert run("fit", *fast(lab, max_steps=6), "--resume", "auto") == 0
    assert training(finished / "export")["steps"] == 6
    assert (finished / "checkpoints/last.ckpt").resolve().name == "step=6.ckpt"


def test_export_takes_the_name_of_the_run_that_learned(lab, finished, capsys):
    last = finished / "checkpoints/last.ckpt"
    straight = [*fast(lab), "--model.sampler", "StraightThrough", "--ckpt_path", last, "--out", "out"]
    assert run("export", *straight) == 1
    assert "model.sampler is GumbelTopK there" in capsys.readouterr().err
    assert not (lab.folder / "out").exists()
    lab.corpus.rename(lab.corpus.with_suffix(".gone"))  # the text is not needed
    try:
        assert run("export", *fast(lab), "--ckpt_path", last, "--out", "out") == 0
    finally:
        lab.corpus.with_suffix(".gone").rename(lab.corpus)
    assert training(finished / "export") == training(lab.folder / "out")


def test_a_switch_of_estimator_is_in_the_export(lab):
    toggle = "{class_path: StraightThroughToggle, init_args: {at_step: 2}}"
    assert run("fit", *fast(lab), f"--trainer.callbacks+={toggle}") == 0
    said = training(lab.folder / "runs/quickstart/export")
    assert said["sampler"].startswith("GumbelTopK(")
    assert said["StraightThroughToggle"] == "straight_through from step 2 on"
    for name in ("optimizer", "lr_end", "init_std", "draw_per", "prior_windows", "fingerprint"):
        assert name in said
    assert "lr=0.05" in said["optimizer"]
    assert "weight_decay=0.0" in said["optimizer"]
