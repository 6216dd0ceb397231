"""The study runner in `benchmarks/`: what its cells are, and what it keeps."""

import gzip
import json
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from benchmarks.study import commands as study_commands
from benchmarks.study import references, run
from benchmarks.study.__main__ import main
from benchmarks.study.cells import Cell, Study, choose_methods
from benchmarks.study.settings import fit_arguments, fit_settings, points_within
from benchmarks.study.work import Usage, WorkFailed, check_claim, claim
from helpers.lab import WORDS, make_lab
from roi_lightning.cli.lightning import build
from roi_lightning.utils.atomic_io import write_json

lab = pytest.fixture(make_lab)


@pytest.fixture
def texts(lab, monkeypatch):
    """A folder like --roi_data, with little in it, and what children need."""
    words, folder = random.Random(1), lab.folder / "texts"
    for name, count in {"corpus/openstax_train": 40, "corpus/openstax_validation": 20}.items():
        file = folder / f"{name}.jsonl.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": " ".join(words.choices(WORDS, k=40))}) for _ in range(count))
        file.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    (folder / "wikitext-2-raw").mkdir()
    (folder / "wikitext-2-raw/wiki.test.raw").write_text(" ".join(words.choices(WORDS, k=300)))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(lab.folder / "datasets"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def options(lab, texts, *more):
    small = {"seq_len": 32, "val_windows": 4, "prior_windows": 2, "prior_seq_len": 32}
    small |= {"eval_seq_len": 32, "eval_windows": 4, "tokens": 512, "points": 4}
    words = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    return ["--roi_data", str(texts), "--out", "out", "--lm", str(lab.model), *words, *more]


def test_fit_understands_a_cell_as_it_is_meant(lab, texts):
    method = choose_methods("roi", ["cool=straight_through --model.lam.end 0.001"])[-1]
    settled = Study(lab.folder / "out", texts, lm=str(lab.model), seq_len=32, batch_size=4)
    cell, folder = Cell(method, "1:4", 128 * 32, 3), settled.out / "1of4/cool/4096-seed3"
    settled.prior("1:4").mkdir(parents=True)
    write_json(folder / "cell.yaml", fit_settings(settled, cell))
    cli = build(fit_arguments(cell, folder))
    assert type(cli.model.sampler).__name__ == "StraightThrough"
    assert (cli.model.lam.start, cli.model.lam.end, cli.model.tau.end) == (0.005, 0.001, 0.05)
    assert (str(cli.model.pattern), cli.model.seed) == ("1:4", 3)
    assert cli.model.start.prior == str(settled.prior("1:4"))
    trainer, data = cli.trainer, cli.datamodule
    trainer.count_micro_batches(data)
    per_step = trainer.accumulate_grad_batches * data.batch_size * data.seq_len
    assert trainer.max_steps * per_step == cell.tokens
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (4, None)
    assert Path(trainer.log_dir) == folder == settled.folder(cell)
    every = {type(callback).__name__: vars(callback) for callback in trainer.callbacks}
    assert every["HardenMasks"]["every_n_steps"] == 4
    assert every["ModelCheckpoint"]["_every_n_train_steps"] == 9
    assert "MaskMonitor" not in every


def test_the_last_validation_falls_on_the_last_step():
    for steps in range(1, 200):
        points = points_within(steps, 8)
        assert steps % points == 0
        divisors = [n for n in range(1, steps + 1) if steps % n == 0]
        assert max(points / 8, 8 / points) == min(max(n / 8, 8 / n) for n in divisors)


def test_a_folder_keeps_to_its_recipe(tmp_path):
    claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a", "b"]}})
    check_claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a", "b"]}})
    with pytest.raises(SystemExit, match=r"cell was made with .*settings.text.1 was 'b' and is 'c' now"):
        claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a", "c"]}})
    with pytest.raises(SystemExit, match=r"settings.text.1 was 'b' and is None now"):
        check_claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a"]}})


def lost(prior, other):
    """The share of what a prior keeps that another directory has as zeros, counted in the weights."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (prior, other))
    names = [name for name in ours if name.endswith("_proj.weight")]
    kept = sum(int((ours[name] != 0).sum()) for name in names)
    return sum(int(((ours[name] != 0) & (theirs[name] == 0)).sum()) for name in names) / kept


@pytest.fixture
def in_process(monkeypatch):
    """Commands of studies run here, which imports nothing again; see above for processes of their own."""

    def run_commands(commands, log):
        monkeypatch.setattr(sys, "argv", ["commands.py", json.dumps(commands)])
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
                study_commands.main()
        except SystemExit as stop:
            raise WorkFailed(f"exit status {stop.code}; {log.read_text()}") from None
        return Usage(1.0, 1 << 30)

    for module in (references, run):
        monkeypatch.setattr(module, "run_commands", run_commands)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.filterwarnings("ignore:Experiment logs directory .* is not empty")
def test_a_study_from_end_to_end(lab, texts, capsys):
    fast = ["--methods", "fast", "--method", "fast=straight_through --model.optimizer.init_args.lr 0.05"]
    written = ["--json", "t.json", "--markdown", "t.md", "--figure", "t.png", "--store", "kept"]
    bad = ["--method", "bad=--model.nonsense 3"]
    assert main(options(lab, texts, *fast, *bad, *written)) == 1
    assert "unrecognized arguments: --model.nonsense" in capsys.readouterr().out
    assert "| bad | failed |" in Path("t.md").read_text()
    dense, prior, learned, failed = json.loads(Path("t.json").read_text())["rows"]
    assert 1 < prior["wikitext2"]["mean"] != dense["wikitext2"]["mean"]
    assert (learned["learned_ratio"], learned["seeds"], failed["seeds"]) == (1, 1, 0)
    folder = Path("out/2of4/fast/512-seed0")
    assert not (folder / "checkpoints").exists()
    assert len(list(folder.glob("masks/*"))) == 4
    assert learned["differs_from_prior"]["mean"] == pytest.approx(
        lost(Path("out/2of4/prior"), folder / "export")
    )
    cell = json.loads((folder / "result.json").read_text())
    assert [tokens for tokens, _ in cell["curve"]] == [128, 256, 384, 512]
    # The dashed lines of the figure are comparable: what Lightning measured is what `held_out` measures.
    data = yaml.safe_load((folder / "cell.yaml").read_text())["data"] | {"tokenizer": str(lab.model)}
    assert cell["curve"][-1][1] == pytest.approx(
        study_commands.held_out(str(folder / "export"), json.dumps(data)), rel=1e-2
    )

    before = {file: file.stat().st_mtime_ns for file in folder.parents[2].rglob("*.*")}
    assert main(options(lab, texts, *fast, *written)) == 0
    assert "begun" not in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in folder.parents[2].rglob("*.*")} == before
    assert json.loads(Path("t.json").read_text())["rows"] == [dense, prior, learned]
    assert Path("t.png").read_bytes().startswith(b"\x89PNG")

    assert str(texts) not in "".join(file.read_text() for file in Path("kept").rglob("*.json"))
    assert main(options(lab, texts, *fast, *written, "--out", "elsewhere")) == 0
    assert "begun" not in capsys.readouterr().out
    assert json.loads(Path("t.json").read_text())["rows"] == [dense, prior, learned]
    with pytest.raises(SystemExit, match=r"512-seed0 was made with other arguments: .* was 2 and is 1 now"):
        main(options(lab, texts, *fast, "--points", "8"))
