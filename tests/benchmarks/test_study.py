"""The study runner in `benchmarks/`: what its cells are, what it keeps, and what its table says."""

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
from benchmarks.study.__main__ import build_parser, main
from benchmarks.study.cells import Cell, Method, Study, choose_methods, left_out, make_cells
from benchmarks.study.cost import cost_markdown, cost_rows
from benchmarks.study.effective import effective
from benchmarks.study.figure import curves, draw_study
from benchmarks.study.history import curve, step_times
from benchmarks.study.settings import (
    checkpoint_steps,
    cost_settings,
    fit_arguments,
    fit_settings,
    points_within,
)
from benchmarks.study.table import as_markdown, make_rows
from benchmarks.study.work import Usage, WorkFailed, check_claim, claim, run_logged, sole_user
from cli_helpers import WORDS, make_lab
from roi_lightning.cli.lightning import build
from roi_lightning.utils.atomic_io import write_json

lab = pytest.fixture(make_lab)
ROI = Method("roi")
TEXTS = ["wikitext2", "openstax_validation"]


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


# Cells.


def test_fit_understands_a_cell_as_it_is_meant(lab, texts):
    method = choose_methods("roi", ["cool=straight_through --model.lam.end 0.001"])[-1]
    settled = Study(lab.folder / "out", texts, lm=str(lab.model), seq_len=32, batch_size=4)
    cell, folder = Cell(method, "1:4", 128 * 32, 3), settled.out / "1of4/cool/4096-seed3"
    settled.prior("1:4").mkdir(parents=True)
    write_json(folder / "cell.yaml", fit_settings(settled, cell))
    cli = build(fit_arguments(cell, folder))
    assert type(cli.model.state.sampler).__name__ == "StraightThrough"
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


def test_a_method_may_have_text_of_its_own_and_a_study_more_to_measure(lab, texts):
    fiction = lab.folder / "story.txt"
    fiction.write_text("once upon a time")
    own, shared = choose_methods("own,roi", ["own=roi --data.corpora python-docs"])
    study = Study(lab.folder / "out", texts, text=[f"fiction={fiction}"])
    cell = Cell(own, "2:4", 1024, 0)
    given = effective(fit_arguments(cell, Path())[:-2], fit_settings(study, cell))
    assert given["data.corpora"] == "python-docs"
    assert fit_settings(study, Cell(shared, "2:4", 1024, 0))["data"]["corpora"] == study.train
    recipe = run.recipe_of(study, cell)
    assert recipe["evaluation"]["texts"] == ["fiction"]
    *_, command = references.evaluate(study, "MODEL", lab.folder)
    assert command[command.index("--text") + 1] == str(fiction)
    assert study.portable(str(fiction)) == "fiction"


def test_the_last_validation_falls_on_the_last_step():
    for steps in range(1, 200):
        points = points_within(steps, 8)
        assert steps % points == 0
        divisors = [n for n in range(1, steps + 1) if steps % n == 0]
        assert max(points / 8, 8 / points) == min(max(n / 8, 8 / n) for n in divisors)


def test_no_checkpoint_is_where_a_validation_is():
    for steps in range(3, 200):
        interval = steps // points_within(steps, 8)
        every = checkpoint_steps(steps, interval)
        both = set(range(every, steps + 1, every)) & set(range(interval, steps + 1, interval))
        assert not both or interval == 1
    assert checkpoint_steps(300, 30) == 74
    assert checkpoint_steps(1, 1) == 1


def test_tokens_that_leave_a_step_unfilled_are_refused():
    settled = Study(Path("out"), Path("texts"), seq_len=512, batch_size=2)
    assert settled.steps(307200) == 300
    with pytest.raises(SystemExit, match=r"307201 is no multiple of 1024, one step; near: 307200, 308224"):
        settled.steps(307201)


def test_what_a_method_cannot_learn_is_left_out_and_said(tmp_path):
    methods = choose_methods("roi,proxsparse", [])
    args = build_parser().parse_args(
        ["--roi_data", ".", "--patterns", "2:4,2:8", "--tokens", "1024,2048", "--seeds", "0,1"]
    )
    cells = make_cells(methods, args)
    assert len(cells) == 2 * 2 * 2 + 1 * 2 * 2
    assert {cell.pattern for cell in cells if cell.method.name == "proxsparse"} == {"2:4"}
    assert [note.split(":")[:2] for note in left_out(methods, ["2:4", "2:8"])] == [
        ["proxsparse at 2", "8 is left out"]
    ]
    settled = Study(tmp_path, tmp_path)
    proxsparse, roi = (Cell(method, "2:4", 1024, 0) for method in reversed(methods))
    assert "prior" not in fit_settings(settled, proxsparse)["model"]["init_args"]
    assert "prior" not in cost_settings(settled, proxsparse, tmp_path)["model"]["init_args"]
    assert fit_settings(settled, roi)["model"]["init_args"]["prior"] == str(tmp_path / "2of4/prior")


# Recipes.


def test_the_same_settings_are_the_same_recipe_wherever_they_stand(lab, texts):
    (lab.folder / "over.yaml").write_text(
        "model: {init_args: {sampler: StraightThrough, lam: {class_path: Linear, init_args: {start: 0.5, end: 0.1}}, "
        "lr_end: 5.0e-5}}"
    )
    base = ["--config", "quickstart.yaml"]
    on_file = [*base, "--model.sampler", "GumbelTopK", "--config", str(lab.folder / "over.yaml")]
    typed = [*base, "--model.sampler=StraightThrough", "--model.lam", "Linear"]
    typed += ["--model.lam.start", "0.5", "--model.lam.init_args.end", "0.1", "--model.lr_end", "5e-5"]
    last = {"model": {"init_args": {"lm": str(lab.model), "lam": {"init_args": {"fraction": 0.5}}}}}
    write_json(lab.folder / "last.yaml", last)
    found = [build([*words, "--config", str(lab.folder / "last.yaml")]) for words in (on_file, typed)]
    parsed, again = (cli.config.as_dict()["model"] for cli in found)
    assert parsed == again
    recipe = effective(on_file, last)
    assert recipe == effective(typed, last)
    assert recipe["model.lam.fraction"] == 0.5
    assert recipe != effective(on_file, {"model": {"init_args": {"lm": str(lab.model)}}})
    assert recipe != effective([*on_file, "--model.sampler", "GumbelTopK"], last)
    assert recipe == effective([*on_file, "--model.optimizer.fused", "false"], last), (
        "a way to compute the same"
    )
    assert recipe != effective([*on_file, "--model.optimizer.lr", "0.5"], last)


# Folders and processes.


def test_a_folder_keeps_to_its_recipe(tmp_path):
    claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a", "b"]}})
    check_claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a", "b"]}})
    with pytest.raises(SystemExit, match=r"cell was made with .*settings.text.1 was 'b' and is 'c' now"):
        claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a", "c"]}})
    with pytest.raises(SystemExit, match=r"settings.text.1 was 'b' and is None now"):
        check_claim(tmp_path / "cell", {"settings": {"steps": 3, "text": ["a"]}})


def test_one_study_at_a_time(tmp_path):
    with sole_user(tmp_path / "out"), pytest.raises(SystemExit, match="another study"):
        sole_user(tmp_path / "out").__enter__()
    with sole_user(tmp_path / "out"):
        pass


def test_a_process_is_measured_and_its_failure_told(tmp_path):
    log, program = tmp_path / "run/log.txt", "import time; kept = b'x' * 300_000_000; print('held')"
    usage = run_logged(["-c", program], log)
    assert usage.peak_rss_bytes > 300_000_000
    assert usage.seconds >= 0
    with pytest.raises(WorkFailed, match=r"(?s)exit status 3; .*log.txt:\nheld\nwhy it failed$"):
        run_logged(["-c", "import sys; print('why it failed', file=sys.stderr); sys.exit(3)"], log)


def test_a_record_survives_a_run_that_was_killed(tmp_path):
    lines = [{"step": 0, "time": 10}, {"step": 1, "time": 17}, {"step": 2, "time": 19}]
    lines += [{"validated": 2, "perplexity": 50.0, "time": 30}, {"step": 3, "time": 33}]
    lines += [{"step": 4, "time": 35}, {"validated": 4, "perplexity": 40.0, "time": 44}]
    resumed = [{"step": 3, "time": 1000}, {"step": 4, "time": 1005}]
    resumed += [{"validated": 4, "perplexity": 41.0, "time": 1010}]
    file = tmp_path / "record.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines + resumed))
    assert step_times(file) == [7, 2, 3, 2, 5]
    assert step_times(file, skip=3) == [2, 5]
    assert curve(file) == {2: 50.0, 4: 41.0}


# What comes out.


def result(wikitext2, seconds, rss, differs=0.25):
    measured = {"wikitext2": wikitext2, "openstax_validation": wikitext2 / 2, "differs_from_prior": differs}
    cost = {"seconds_per_step": seconds, "peak_rss_bytes": rss, "learned": 300, "prunable": 200}
    return measured | cost | {"curve": [[512, 4 * wikitext2], [1024, wikitext2]]}


@pytest.fixture
def found():
    """Two methods at one pattern, one of them with a failure, and a third that failed altogether."""
    other, broken = Method("other"), Method("broken")
    kinds = [(ROI, 0), (ROI, 1), (other, 0), (other, 1), (broken, 0)]
    cells = [Cell(method, "2:4", 1024, seed) for method, seed in kinds]
    values = [result(70.0, 2.0, 1000), result(80.0, 4.0, 3000), result(90.0, 6.0, 3000)]
    results = {cell.name: value for cell, value in zip(cells, values, strict=False)}
    references = {
        "dense": {"wikitext2": 20.0, "openstax_validation": 10.0, "held_out": 11.0},
        "2:4": {"wikitext2": 200.0, "openstax_validation": 100.0, "held_out": 110.0},
    }
    return cells, results, references


def test_the_table_has_means_and_ranges(found):
    rows = make_rows(*found, TEXTS)
    assert [row["method"] for row in rows] == ["dense", "prior", "roi", "other", "broken"]
    roi, other, broken = rows[2:]
    assert roi["wikitext2"] == {"mean": 75.0, "min": 70.0, "max": 80.0}
    assert (roi["seeds"], other["seeds"], other["failed"], broken["failed"]) == (2, 1, 1, 1)
    assert roi["learned_ratio"] == 1.5
    assert roi["seconds_per_step"] == {"mean": 3.0, "min": 2.0, "max": 4.0}
    lines = as_markdown(rows, ["A note."], TEXTS).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[3:9]] == ["dense", "", "", "11.00", "20.00", "10.00"]
    assert lines[4].split(" | ")[5:8] == ["75.00 (70.00–80.00)", "75.00 (70.00–80.00)", "37.50 (35.00–40.00)"]
    assert "| other | 1 (1 failed) | 1.5 | 90.00 | 90.00 | 45.00 | 25.00% |" in lines[5]
    assert "| broken | failed |" in lines[6]
    assert lines[-1] == "- A note."


def test_the_figure_has_a_line_per_method(found, tmp_path):
    cells, results, references = found
    results[cells[2].name]["curve"] = [[512, float("inf")], [1024, 90.0]]
    assert curves(cells, results) == {
        ("2:4", "roi", 1024): [(512, [280.0, 320.0]), (1024, [70.0, 80.0])],
        ("2:4", "other", 1024): [(1024, [90.0])],
    }
    draw_study(cells, results, references, "A study", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_cost_of_a_step_is_a_median_over_runs():
    runs = [("roi", [1.0, 2.0, 3.0], 2**30), ("other", [4.0, 4.0, 100.0], 2**31)]
    runs += [("roi", [2.0, 2.0, 9.0], 2**29), ("other", [4.0, 5.0, 6.0], 2**31)]
    named = [{"pattern": "2:4", "method": m, "step_seconds": s, "peak_rss_bytes": p} for m, s, p in runs]
    roi, other = cost_rows(named)
    assert (roi["seconds_per_step"], roi["seconds_per_step_by_run"], roi["runs"]) == (2.0, [2.0, 2.0], 2)
    assert (other["seconds_per_step"], other["seconds_per_step_by_run"]) == (4.5, [4.0, 5.0])
    assert (other["seconds_per_step_ratio"], other["peak_rss_bytes_ratio"]) == (2.25, 2.0)
    last = cost_markdown([roi, other], []).splitlines()[-1]
    assert last == "| 2:4 | other | 4.50 | 4.00, 5.00 | 2.25 | 75.0 | 2.00 | 2.00 |"


# Whole studies.


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
    assert "'nonsense' is not accepted" in capsys.readouterr().out
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
