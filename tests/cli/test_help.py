"""What a stranger is shown: help in groups, near names, one spelling of a thing, versions."""

import os
import re
import signal
import sys
from contextlib import ExitStack, suppress
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import yaml

from helpers.lab import make_lab, run
from helpers.refusals import make_bench
from roi_lightning.__main__ import main
from roi_lightning.cli.commands import SHORT
from roi_lightning.cli.lightning import build
from roi_lightning.cli.plan import PlanCLI
from roi_lightning.cli.stored_help import answer

lab = pytest.fixture(make_lab)
bench = pytest.fixture(make_bench)
COMMANDS = ("fit", "validate", "export", "plan")
# What is typed in full with a value, for every short name.
VALUES = {
    "--lm": "smollm2-135m",
    "--pattern": "1:4",
    "--patterns": '{"k_proj": "4:8"}',
    "--sampler": "StraightThrough",
    "--prior": "none",
    "--corpora": "some.txt",
    "--seq_len": "77",
    "--steps": "3",
    "--lr": "0.25",
    "--seed": "5",
}


def shown(capsys, *words):
    assert run(*words) == 0
    return capsys.readouterr().out


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Run a command as a process of its own begins, with a stream for its output; the exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = signal.getsignal(signal.SIGINT)

    def start(*words, stdout="out"):
        monkeypatch.setattr(sys, "argv", ["roi-lightning", *map(str, words)])
        with monkeypatch.context() as patch, ExitStack() as opened:
            for name, path in (("stdout", stdout), ("stderr", "err")):
                stream = path and opened.enter_context(open(path, "w", encoding="ascii"))  # noqa: PTH123
                patch.setattr(sys, name, stream)
            try:
                return main()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(OSError):
                        stream.close()

    yield start
    signal.signal(signal.SIGINT, before)


def parsed(*words):
    return build([str(word) for word in words], "plan", PlanCLI).config.as_dict()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_groups_and_what_docstrings_say(command, capsys):
    text = shown(capsys, command, "--help")
    assert f"usage: roi-lightning {command} --config FILE" in text
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["run", "model", "method", "data", "trainer"]
    words = " ".join(text.split())
    assert "--pattern PATTERN, --model.pattern PATTERN N:M, N kept of every M consecutive inputs" in words
    assert "--model.prior_windows" not in text
    assert "--trainer.precision" not in text


def test_all_options_of_a_run_are_shown(lab, capsys):
    told = set(re.findall(r"--((?:model|data|trainer)\.\w+) ", shown(capsys, "fit", "--help_all")))
    config = parsed(*lab.quick())
    linked = {"model.seed", *(f"data.{name}" for name in ("seed", "tokenizer", "tokenizer_revision"))}
    linked.add("data.trust_remote_code")
    takes = {f"{part}.{name}" for part in ("model", "data") for name in config[part]["init_args"]}
    told = {name for name in told if not name.endswith(".help")}
    assert takes | {f"trainer.{name}" for name in config["trainer"]} == told | linked


def test_short_names_are_the_full_ones(lab):
    assert VALUES.keys() == SHORT.keys()
    words = [[name, f"{SHORT[name]}"] for name in VALUES]
    short, full = (
        parsed(
            *(word for names, value in zip(words, VALUES.values(), strict=True) for word in (names[i], value))
        )
        for i in (0, 1)
    )
    assert short == full
    model, data = short["model"]["init_args"], short["data"]["init_args"]
    assert (model["lm"], str(model["pattern"]), model["prior"]) == ("smollm2-135m", "1:4", "none")
    assert {name: str(own) for name, own in model["patterns"].items()} == {"k_proj": "4:8"}
    assert model["sampler"]["class_path"].endswith(".StraightThrough")
    assert (data["corpora"], data["seq_len"]) == ("some.txt", 77)
    assert (short["trainer"]["max_steps"], short["seed_everything"]) == (3, 5)
    assert model["optimizer"]["init_args"]["lr"] == 0.25


def test_dashes_are_underscores(lab, capsys):
    words = lab.quick("--seq-len", "16", "--model.init-std=0.25", "--trainer.max-steps", "2")
    config = yaml.safe_load(shown(capsys, "fit", *words, "--print-config"))
    assert (config["data"]["init_args"]["seq_len"], config["model"]["init_args"]["init_std"]) == (16, 0.25)
    assert run("evaluate", "nowhere", "--seq-len", "1") == 1
    assert "--seq_len is 1; give at least" in capsys.readouterr().err


QUICK = ("--config", "quickstart.yaml")
MISTAKES = {
    "a command": (("fitt",), "no command 'fitt'; did you mean fit?"),
    "no configuration": (("fit",), "required: --lm.*try: roi-lightning fit --help"),
    "a sampler": (("fit", *QUICK, "--sampler", "Gumbel"), "model.sampler 'Gumbel' .*did you mean GumbelTopK"),
    "a value": (("fit", *QUICK, "--seq_len", "many"), '"seq_len": Expected.*int.*many'),
    "an option": (("fit", *QUICK, "--wrong", "3"), "^error: unrecognized arguments: --wrong try: "),
    "an option of the learner": (("fit", *QUICK, "--model.init_stdd", "3"), "did you mean --model.init_std?"),
    "another section": (
        ("plan", *QUICK, "--data.max_steps=3"),
        r"did you mean --trainer.max_steps \(or --steps\)",
    ),
    "a learning rate": (("fit", "--model.lr", "3"), r"did you mean --model.optimizer.lr \(or --lr\)\?"),
    "its name": (("fit", "--learning-rate", "3"), r"did you mean --model.optimizer.lr \(or --lr\)\?"),
    "an option of another command": (("plan", *QUICK, "--resume"), "unrecognized arguments: --resume"),
    "a configuration": (
        ("plan", "--config", "quickstat"),
        "no configuration 'quickstat'.*did you mean quickstart",
    ),
    "an option inside": (("fit", *QUICK, "--model.optimizer.lrr", "3"), "'lrr' is not accepted"),
    "a command by another name": (("train",), "no command 'train'; did you mean fit?"),
    "a pattern that the shell spelled out": (
        ("fit", *QUICK, "--corpora", "a.txt", "b.txt"),
        "unrecognized arguments: b.txt; put a pattern like .* in quotes",
    ),
    "text in place of a path": (("verify", "word " * 1000), "^error: .*word word"),
    "nobody's home": (("verify", "x", "--base", "~nobody_here/x"), "'~nobody_here/x' is no directory"),
    "an empty path": (("verify", "x", "--json", " "), '"json":.*is empty; give one'),
    "extends": (("fit", *QUICK, "--extends", "x"), "extends is for a configuration's file"),
    "no checkpoint": (("validate", *QUICK), "^error: validate needs --ckpt_path"),
}


@pytest.mark.parametrize(("words", "told"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_a_line_or_two(words, told, capsys):
    assert run(*words) in (1, 2)
    captured = capsys.readouterr()
    assert re.search(told, " ".join(captured.err.splitlines())), captured.err
    assert len(captured.err.splitlines()) <= 2
    assert not captured.out


OF_ONES_OWN = {
    "own.yaml": "model: ProxSparseModule",
    "more.yaml": "{extends: own.yaml, data: {class_path: my.Text}}",
}
ACCEPTED = {
    "inside classes, lists, negative numbers, what links set": (
        *("--model.optimizer.init_args.lr=0.1", "--model.tau.start", "0.3", "--data.corpora+", "x"),
        *(
            "--trainer.callbacks+=HardenMasks",
            "--model.init_args.prior_margin",
            "-1",
            "--data.tokenizer",
            "x",
        ),
        *("--model.patterns.k_proj", "4:8", "--run", "--a b", "--trainer.max-steps=-1", "--resume"),
    ),
    "a short option and its value": ("-cquickstart", "--steps=3"),
    "another class": ("--model", "ProxSparseModule", "--model.strength=2"),
    "a class by its path": ("--model.class_path=ProxSparseModule", "--model.strength=2"),
    "a class of a configuration": ("--config", "own.yaml", "--model.strength", "2"),
}


@pytest.mark.parametrize("words", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_the_parser_accepts_is_not_refused_before(lab, words, capsys):
    for name, text in OF_ONES_OWN.items():
        (lab.folder / name).write_text(text)
    config = yaml.safe_load(shown(capsys, "fit", *QUICK, *words, "--print_config"))
    assert config["resume"] == ("auto" if "--resume" in words else None)
    assert answer("fit", ["--config=more.yaml", "--model.any=3", "--data.any=3"]) is None
    assert answer("fit", ["--trainer.max_st", "3"]) is None, "jsonargparse warns of what is cut short"


def test_a_run_s_folder_is_not_its_export(tmp_path, capsys):
    (tmp_path / "run/export").mkdir(parents=True)
    (tmp_path / "run/export/roi_sparsity.json").write_text("{}")
    assert run("verify", tmp_path / "run") == 1
    assert f"holds one; give '{tmp_path / 'run/export'}'" in capsys.readouterr().err


def test_class_paths_may_name_files_of_the_working_folder_and_replace_no_library(tmp_path, started):
    assert started("train") == 2
    for name in ("my_own_module", "colorsys"):
        (tmp_path / f"{name}.py").touch()
    PathFinder.invalidate_caches()
    assert Path(PathFinder.find_spec("my_own_module").origin).samefile("my_own_module.py")
    assert not Path(PathFinder.find_spec("colorsys").origin).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("command", "stdout", "status"),
    [("verify", stdout, 0) for stdout in ("left", "closed", "ascii")]
    + [(command, "full", 1) for command in ("compare", "evaluate", "plan", "verify")],
)
def test_results_and_status_do_not_hang_on_what_can_be_printed(bench, started, command, stdout, status):
    words = {
        "compare": [bench.mask, f"again={bench.mask}", "--out", "out"],
        "evaluate": [bench.model, "--text", bench.corpus, "--seq_len", "32", "--limit", "2"],
        "plan": bench.lean(),
        "verify": [bench.export],
    }[command]
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"left": writer, "closed": None, "ascii": "said", "full": "/dev/full"}
    assert started(command, *words, "--json", "out.json", stdout=streams[stdout]) == status
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "Ctrl-C at the very end shows no traceback"
    assert Path("out.json").is_file()
